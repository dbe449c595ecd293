// The list of operators: schemas, declarations of kernels and registrations are made from it. It
// includes nothing of torch's, because kernels see no torch.
#pragma once

// OPERATOR(name, Name) for every operator with C++ kernels for CPUs and GPUs: torch calls it
// `name`, check_name (arguments.h) makes a NameCall of its arguments, and its kernels read the
// NameParams in there (core/params.h).
#define SPECDEC_KERNELS(OPERATOR)   \
  OPERATOR(row_law, RowLaw)         \
  OPERATOR(sample, Sample)          \
  OPERATOR(verify, Verify)          \
  OPERATOR(verify_tree, VerifyTree) \
  OPERATOR(acceptance, Acceptance)  \
  OPERATOR(uniforms, Uniforms)      \
  OPERATOR(tree_mask, TreeMask)     \
  OPERATOR(compact_kv, CompactKv)   \
  OPERATOR(beam_verify, BeamVerify)

// The same for every operator. The last has no kernels in C++: see specdec_ext/attention.py and
// specdec_ext/triton.
#define SPECDEC_OPERATORS(OPERATOR) \
  SPECDEC_KERNELS(OPERATOR)         \
  OPERATOR(tree_attention, TreeAttention)
