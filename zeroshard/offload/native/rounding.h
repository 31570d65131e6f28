// Rounding of parameters from fp32 to bf16, and the random bits for the rounding of moments (codes.h).
#pragma once

#include "lanes.h"

namespace {

// Half away from zero. The bf16 value is in the upper half of each word, and the lower half has no meaning. What is lost, bits - (high << 16), then always fits into int16, so that a split
// master is exact. With ties to even, ties of either parity would leave the same remainder. Overflow gives inf, which
// is right. A NaN must be canonical.
inline Words nearest(Floats x) { return bits(x) + 0x8000u; }

// Random bits for the roundings of one parameter in one step. They depend only on the element's index.
class Dice {
 public:
  Dice(uint64_t seed, uint64_t key, uint64_t step, uint64_t index) {
    const uint64_t state = absorb(absorb(absorb(absorb(0, seed), key), step), index >> 32);
    stride_ = uint32_t(state) | 1;
    first_ = uint32_t(state >> 32) + uint32_t(index) * stride_;
    for (int lane = 0; lane < LANES; ++lane) lanes_[lane] = uint32_t(lane) * stride_;
  }

  // 32 random bits for each of LANES elements, which begin `offset` elements after the index. The bits are the hash of
  // an arithmetic sequence (multipliers: C. Wellons, "hash-prospector"). The lower bits are for the first moment, the
  // upper bits for the second.
  Words roll(int64_t offset) const { return half_roll(offset) * 0xD35A2D97u; }

  // The hash before its last multiplication.
  Words half_roll(int64_t offset) const {
    Words x = lanes_ + (first_ + uint32_t(offset) * stride_);
    x = (x ^ x >> 16) * 0x21F0AAADu;
    return x ^ x >> 15;
  }

 private:
  static uint64_t absorb(uint64_t state, uint64_t word) {  // one step of splitmix64
    uint64_t x = state + word + 0x9E3779B97F4A7C15u;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
  }

  uint32_t stride_, first_;
  Words lanes_;
};

// Random bits for the elements of a tile: 16 hashes, each multiplied with four numbers, which costs a third of a hash
// for each element. Bits 5 and 2 of an element's index choose the number, the other bits choose the hash. So a vector of
// any path has one number. The lattices of all pairs of these numbers, in the lowest 16 to 32 bits, have a shortest
// vector of at least 0.6 times the best possible length.
class TileDice {
 public:
  TileDice(const Dice& dice, int64_t offset) {
    for (int part = 0; part < PARTS; ++part) hashes_[part] = dice.half_roll(offset + part * LANES);
  }

  // For the elements of one vector of the tile.
  Words roll(int vector) const {
    constexpr uint32_t multipliers[4] = {0xD35A2D97u, 0xD0055979u, 0xA28E6D2Bu, 0x682DF1E7u};
    return hashes_[vector / 2 % PARTS] * multipliers[vector * LANES / 32 * 2 + vector % 2];
  }

 private:
  static constexpr int PARTS = 16 / LANES;

  Words hashes_[PARTS];
};

}  // namespace
