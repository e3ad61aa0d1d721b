// C ABI of the router: from logits to routes, weights, places and counts, as DeepSpeed's TopKGate
// decides, without a host that waits. And the second half alone, where DeepSpeed's gate has
// decided.
//
// A token of up to kMaxTopk experts names each of them once. Where torch leaves the order of equal
// values open, the lower expert comes first, and the route of the lower token is kept. All sums are
// made in a fixed order: the same logits give the same bits in every run.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace tilemoe {

constexpr int32_t kMaxTopk = 16;
constexpr int32_t kMaxRouterExperts = 1024;

// How many routes an expert keeps of one rank's tokens.
enum class Drop : int32_t {
  none = 0,
  position = 1,     // first choices of all tokens in token order, then second ones (k <= 2)
  probability = 2,  // the highest gate probabilities (k > 2)
};

// Where routes stand. All device memory, written by the kernels.
struct PlacesParams {
  const int32_t* expert_ids;  // [T, K] global expert, -1 = dropped
  int32_t* positions;  // [T, K] earlier kept routes of this rank to the same expert, in order
                       // of (token, k); no meaning where dropped
  int32_t* sources;    // [T * K] token of each kept route, in order of (expert, token, k)
  int32_t* counts;     // [E] kept routes
  int32_t* scratch;    // tilemoe_places_scratch_bytes, at a multiple of 16
  int32_t tokens;      // T, may be 0
  int32_t topk;        // K
  int32_t experts;     // E
};

struct RouterParams {
  const float* logits;  // [T, E], DeepSpeed's own fp32 F.linear; or [slices, T, parts, E] of
                        // logits.h, to be added
  int32_t* expert_ids;  // [T, K], written
  float* weights;       // [T, K], written; 0 where dropped
  float* l_aux;         // one number, written
  int64_t* exp_counts;  // [E] routes before dropping, written
  PlacesParams places;  // its expert_ids is ours
  void* scratch;        // tilemoe_router_scratch_bytes, at a multiple of 16
  uint64_t* start_ns;   // device: time when the router began (State::router_start_ns); or null
  Drop drop;
  int32_t capacity;      // routes that an expert keeps; not read where drop is none
  int32_t logit_parts;   // 1, or 3 (split.h)
  int32_t logit_slices;  // 1 or more
};

}  // namespace tilemoe

extern "C" {

int64_t tilemoe_places_scratch_bytes(int32_t tokens, int32_t experts);
int64_t tilemoe_router_scratch_bytes(int32_t tokens, int32_t topk, int32_t experts);

// Loads the kernels of the current device: once, at start-up.
cudaError_t tilemoe_router_load();

// A token that names one expert twice has one row of it, at one position.
cudaError_t tilemoe_places_launch(const tilemoe::PlacesParams* params, cudaStream_t stream);
cudaError_t tilemoe_router_launch(const tilemoe::RouterParams* params, cudaStream_t stream);
}
