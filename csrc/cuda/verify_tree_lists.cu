// Tree verification where the draft's laws are lists of tokens: verify_tree.cu once more, with the
// code for them, so that its own kernels have none of it.
#define SPECDEC_LISTS 1
#define SPECDEC_CPU_ISA with_lists
#include "verify_tree.cu"
