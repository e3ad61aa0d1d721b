// C ABI of the planner: 0, or 1 with the reason in `message`, a text of at most `message_bytes`.
#include <cstdio>
#include <exception>

#include "planner.h"

#define TILEMOE_C_API extern "C" __attribute__((visibility("default")))

namespace {

template <class Call>
int guarded(char* message, size_t message_bytes, Call&& call) noexcept {
  try {
    call();
    return 0;
  } catch (const std::exception& error) {
    std::snprintf(message, message_bytes, "%s", error.what());
    return 1;
  }
}

}  // namespace

TILEMOE_C_API int tilemoe_plan_sizes(const tilemoe::PlanParams* params, const int32_t* counts,
                                     tilemoe::PlanSizes* sizes, char* message,
                                     size_t message_bytes) {
  return guarded(message, message_bytes, [&] { *sizes = tilemoe::plan_sizes(*params, counts); });
}

TILEMOE_C_API int tilemoe_plan_fill(const tilemoe::PlanParams* params, const int32_t* counts,
                                    tilemoe::PlanView* plan, char* message, size_t message_bytes) {
  return guarded(message, message_bytes, [&] { tilemoe::plan_fill(*params, counts, plan); });
}

TILEMOE_C_API int tilemoe_plan_bounds(const tilemoe::PlanParams* params, int64_t max_rows_in,
                                      tilemoe::PlanSizes* bounds, char* message,
                                      size_t message_bytes) {
  return guarded(message, message_bytes,
                 [&] { *bounds = tilemoe::plan_bounds(*params, max_rows_in); });
}
