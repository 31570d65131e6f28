// From fp32 to bf16: half away from zero for parameters, stochastically for moments.
#pragma once

#include "lanes.h"

namespace {

// Both leave the bf16 value in the upper halves, and what is to be forgotten below.

// For parameters, half away from zero: what is lost, bits - (high << 16), then always fits int16. To nearest even it
// would not: ties of either parity would leave the same remainder. Overflow gives inf, as it should; a NaN must be
// canonical.
inline Words nearest(Floats x) { return bits(x) + 0x8000u; }

// Bits that decide the roundings of one parameter in one step, as a function of the element's index alone.
class Dice {
 public:
  Dice(uint64_t seed, uint64_t key, uint64_t step, uint64_t index) {
    const uint64_t state = absorb(absorb(absorb(absorb(0, seed), key), step), index >> 32);
    stride_ = uint32_t(state) | 1;
    first_ = uint32_t(state >> 32) + uint32_t(index) * stride_;
    for (int lane = 0; lane < LANES; ++lane) lanes_[lane] = uint32_t(lane) * stride_;
  }

  // 32 random bits for each of the LANES elements from `offset` after the index on: a sequence with a stride of its
  // own, hashed (multipliers: C. Wellons, "hash-prospector"). The lower 16 are for the first moment, the upper for the
  // second.
  Words roll(int64_t offset) const {
    Words x = lanes_ + (first_ + uint32_t(offset) * stride_);
    x = (x ^ x >> 16) * 0x21F0AAADu;
    return (x ^ x >> 15) * 0xD35A2D97u;
  }

 private:
  static uint64_t absorb(uint64_t state, uint64_t word) {  // a step of splitmix64
    uint64_t x = state + word + 0x9E3779B97F4A7C15u;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
  }

  uint32_t stride_, first_;
  Words lanes_;
};

// For moments, up with the probability of what is lost: `random` is below 2^16.
inline Words stochastic(Floats x, Words random) { return bits(x) + random; }

// The same where x may be anything. From the largest finite bf16 value on it is cut off: finite values must not become
// inf, and inf and a canonical NaN have nothing to cut.
inline Words stochastic_or_cut(Floats x, Words random) {
  return (bits(x) & 0x7FFFFFFFu) < 0x7F7F0000u ? bits(x) + random : bits(x);
}

}  // namespace
