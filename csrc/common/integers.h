// Arithmetic of whole numbers, on the host and in kernels.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../plan_abi.h"

namespace tilemoe {

// value >= 0, by >= 1. Does not add the two: by may be the largest number there is ("join all").
template <class T>
TILEMOE_HOST_DEVICE constexpr T ceil_div(T value, std::common_type_t<T> by) {
  return value / by + (value % by != 0 ? 1 : 0);
}

TILEMOE_HOST_DEVICE constexpr int64_t round_up(int64_t value, int64_t to) {
  return ceil_div(value, to) * to;
}

}  // namespace tilemoe
