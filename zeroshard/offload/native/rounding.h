// From fp32 to bf16: half away from zero for parameters, stochastically for moments.
#pragma once

#include "lanes.h"

namespace {

// A parameter's bf16 half, such that bits - (high << 16) always fits int16. To nearest even would not: ties of either
// parity would leave the same remainder. Overflow gives inf, as it should; a NaN must be canonical.
inline Words nearest_half(Words x) { return (x + 0x8000u) >> 16; }

// Bits that decide the roundings of one parameter in one step.
class Dice {
 public:
  Dice(uint64_t seed, uint64_t key, uint64_t step, uint64_t index)
      : low_(uint32_t(index)), lanes_(first_lanes()) {
    const uint64_t state = absorb(absorb(absorb(absorb(0, seed), key), step), index >> 32);
    before_ = uint32_t(state);
    between_ = uint32_t(state >> 32);
  }

  // 32 random bits for each of the LANES elements from `offset` after the index on: a keyed integer hash of that index
  // (multipliers: C. Wellons, "hash-prospector"). The upper 16 are for the second moment, the lower for the first.
  Words roll(int64_t offset) const {
    Words x = (lanes_ + (low_ + uint32_t(offset))) ^ before_;
    x = (x ^ x >> 16) * 0x21F0AAADu;
    x = (x ^ x >> 15) + between_;
    x = (x ^ x >> 16) * 0xD35A2D97u;
    return x ^ x >> 15;
  }

 private:
  static Words first_lanes() {
    Words lanes;
    for (int lane = 0; lane < LANES; ++lane) lanes[lane] = uint32_t(lane);
    return lanes;
  }

  static uint64_t absorb(uint64_t state, uint64_t word) {  // a step of splitmix64
    uint64_t x = state + word + 0x9E3779B97F4A7C15u;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
  }

  uint32_t low_, before_, between_;
  Words lanes_;
};

// The bf16 half of x, up with the probability of what lies below it. `random` is below 2^16. Inf and a canonical NaN
// have nothing below; a finite value never becomes inf.
inline Words stochastic_half(Floats x, Words random) {
  const Words magnitude = bits(x) & 0x7FFFFFFFu;
  const Words raised = magnitude + random;
  const Words largest = Words{} + 0x7F7FFFFFu;
  const Words finite = raised < largest ? raised : largest;
  return ((magnitude < 0x7F800000u ? finite : raised) | (bits(x) & 0x80000000u)) >> 16;
}

}  // namespace
