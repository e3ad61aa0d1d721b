// Params of dispatch, a role of GEMM 1's kernel: rows of this rank's tokens go straight into their
// places in the layouts of their experts' ranks. See dispatch/send.cuh for how it works.
#pragma once

#include <cstdint>

#include "../common/control.h"

namespace tilemoe {

// Pointers are device memory. This rank's row for expert e and position i is row i of its run in
// the layout of e's rank (first row: dispatch_row[e]) and comes from token `sources[recv_row[e] +
// i]`.
struct DispatchParams {
  RankView view;                // view.state null: no dispatch, GEMM 1 finds its rows in place
  const void* x;                // [T, row_bytes], this rank's tokens
  const int32_t* sources;       // [kept routes] token, in order of (expert, token, k)
  const int64_t* dispatch_row;  // [E] of the plan
  const int64_t* recv_row;      // [E + 1] of the plan: exclusive prefix of this rank's counts
  int64_t row_bytes;            // a multiple of 16
  int32_t local_experts;
  // CTAs that send to peers with all their warps before they make tiles. Beside the tiles the spare
  // warps of all CTAs send as well, so 0 is right, too. With few rows all CTAs send first.
  int32_t num_dispatch_ctas;
};

}  // namespace tilemoe
