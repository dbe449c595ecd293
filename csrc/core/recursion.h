// Lossless acceptance as one recursion over the nodes of a draft (docs/design.md, "Acceptance").
//
// A node with target law p and inflow a visits its children in order. Nested rejection residuals
// collapse, [[p - l1 q]+ - l2 q]+ = [p - (l1 + l2) q]+, so a node carries three scalars. On a chain
// this is block verification (Sun et al., arXiv 2403.10444): inflow = w_i, mass = R_i.
#pragma once

#include "platform.h"

namespace specdec {
namespace SPECDEC_CPU_ISA {

// a / b. Where b is 1, as it is at most nodes' first children, without the division: on a GPU that
// takes as long as dozens of other instructions.
SPECDEC_HD double ratio(double a, double b) { return b == 1.0 ? a : a / b; }

// State of a node between two of its children.
struct Node {
  double inflow = 1.0;  // a: probability mass that still has to leave through this node
  double lambda = 0.0;  // the residual here is [p - lambda q]+
  double mass = 1.0;    // S: what that residual sums to
};

// The residual that remains after a child, scaled by inflow / mass: [target p - draft q]+.
struct ResidualCoefficients {
  double target;
  double draft;
};

// min(1, a * p / (kappa * q)), and never a division where q may be zero or the quotient overflow.
// `sampled` false: the child is deterministic, not drawn from q, and its proposal mass is 1.
SPECDEC_HD double child_inflow(const Node& node, double p, double q, double kappa, bool sampled) {
  double residual = p - node.lambda * q;
  if (!(residual > 0.0)) return 0.0;
  const double numerator = node.inflow * ratio(residual, node.mass);
  const double denominator = sampled ? kappa * q : 1.0;
  return numerator >= denominator ? 1.0 : numerator / denominator;
}

SPECDEC_HD ResidualCoefficients residual_after_child(const Node& node, double kappa, bool sampled) {
  const double scale = ratio(node.inflow, node.mass);
  return {scale, scale * node.lambda + (sampled ? kappa : 0.0)};
}

// R / (R + (1 - a)). The parentheses matter: for a near 1 the small difference must not be lost.
// An inflow of 1 stays 1 even where no residual mass is left.
SPECDEC_HD double outflow(double inflow, double scaled_mass) {
  if (inflow >= 1.0) return 1.0;
  if (!(scaled_mass > 0.0)) return 0.0;
  return scaled_mass / (scaled_mass + (1.0 - inflow));
}

// The node after a child: `scaled_mass` is the sum of the residual with `coefficients`.
SPECDEC_HD Node close_child(const Node& node, ResidualCoefficients coefficients,
                            double scaled_mass) {
  const double unscale = ratio(node.mass, node.inflow);
  return {outflow(node.inflow, scaled_mass), coefficients.draft * unscale, scaled_mass * unscale};
}

// The token rule (Leviathan et al. 2023, Algorithm 1): u q < p, strictly, so that u = 0 accepts
// nothing of probability 0, and without a division, so that q may be anything.
SPECDEC_HD bool accepts_token(double u, double p, double q) { return u * q < p; }

SPECDEC_HD double token_accept_probability(double p, double q) { return p >= q ? 1.0 : p / q; }

}  // namespace SPECDEC_CPU_ISA
}  // namespace specdec
