// Flags of the CPU twin: every word that one thread or process writes and another waits for goes
// through here, so that the memory model stands in one place.
//
// clang-format off
// word             written by                      read by                order
// count row ready  its source rank, once an epoch  the block's owner      store release / load acquire
// run counter      the run's source rank           the expert's rank      add release / load acquire
// band counter     the producer, once per N tile   consumers of the rank  add release / load acquire
// arrival counter  consumers of the source rank    the rows' owner        add release / load acquire
// failure time     its source rank, once           the block's owner      store release / load acquire
// failed           any rank that fails             the block's owner      store release / load acquire
// claim counters   producer and consumers          the same               relaxed: they order nothing
// clang-format on
//
// Counters are only added to between two zeroings, and an addition is a read-modify-write, so each
// release heads a release sequence that the acquiring load of the final value joins: a reader that
// sees the sum sees the rows of every thread that added to it.
#pragma once

#include <atomic>
#include <cstdint>

// The protocol test plants one fault at a time (tests/protocol_stress.cpp); a build of the package
// never defines this.
#ifndef TILEMOE_FAULT
#define TILEMOE_FAULT 0
#endif

namespace tilemoe {

enum class Fault : int {
  none = 0,
  no_release = 1,           // flags are raised with relaxed order
  no_acquire = 2,           // flags are polled with relaxed order
  one_count_half = 3,       // C has one half instead of two
  arrival_before_copy = 4,  // rows are counted as arrived before they are copied
};
inline constexpr Fault kFault = static_cast<Fault>(TILEMOE_FAULT);

inline constexpr std::memory_order kRelease =
    kFault == Fault::no_release ? std::memory_order_relaxed : std::memory_order_release;
inline constexpr std::memory_order kAcquire =
    kFault == Fault::no_acquire ? std::memory_order_relaxed : std::memory_order_acquire;

using Word = std::uint64_t;
static_assert(std::atomic_ref<Word>::is_always_lock_free, "flags are shared between processes");

inline void flag_store(Word& word, Word value) { std::atomic_ref(word).store(value, kRelease); }
inline Word flag_add(Word& word, Word value) {
  return std::atomic_ref(word).fetch_add(value, kRelease);
}
inline Word flag_load(const Word& word) {
  return std::atomic_ref(const_cast<Word&>(word)).load(kAcquire);
}

inline Word claim_next(Word& word) {
  return std::atomic_ref(word).fetch_add(1, std::memory_order_relaxed);
}
// Zeroes a word that nobody else touches now; the next flag_store publishes the zero.
inline void reset(Word& word) { std::atomic_ref(word).store(0, std::memory_order_relaxed); }

}  // namespace tilemoe
