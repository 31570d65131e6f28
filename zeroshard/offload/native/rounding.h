// Rounding of parameters from fp32 to bf16, and the random bits for the rounding of moments (codes.h).
#pragma once

#include "lanes.h"

namespace {

// Half away from zero. The bf16 value is in the upper half of each word, and the lower half has no meaning. What is
// lost, bits - (high << 16), then always fits into int16, so that a split master is exact. With ties to even, ties of
// either parity would leave the same remainder. Overflow gives inf, which is right. A NaN must be canonical.
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
  Words roll(int64_t offset) const { return finish(half_roll(offset), 0); }

  // The hash before its last multiplication.
  Words half_roll(int64_t offset) const {
    Words x = lanes_ + (first_ + uint32_t(offset) * stride_);
    x = (x ^ x >> 16) * first_multiplier_;
    return x ^ x >> 15;
  }

  // The last multiplication, with one of four numbers. The lattices of all pairs of these numbers, in the lowest 16 to
  // 32 bits, have a shortest vector of at least 0.6 times the best possible length.
  Words finish(Words half, int number) const { return half * last_multipliers_[number]; }

 private:
  static uint64_t absorb(uint64_t state, uint64_t word) {  // one step of splitmix64
    uint64_t x = state + word + 0x9E3779B97F4A7C15u;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
  }

  uint32_t stride_, first_;
  Words lanes_;
  Words first_multiplier_ = Words{} + unknown(0x21F0AAADu);
  Words last_multipliers_[4] = {Words{} + unknown(0xD35A2D97u), Words{} + unknown(0xD0055979u),
                                Words{} + unknown(0xA28E6D2Bu), Words{} + unknown(0x682DF1E7u)};
};

// Random bits for the elements of a tile: 16 halves of hashes, each finished with four numbers. That costs less than
// half of a hash for each element. Bits 5 and 2 of an element's index choose the number, the other bits choose the
// hash, so that a vector has one number on every path.
class TileDice {
 public:
  TileDice(const Dice& dice, int64_t offset) : dice_(dice) {
    for (int part = 0; part < PARTS; ++part) hashes_[part] = dice.half_roll(offset + part * LANES);
  }

  // For the elements of one vector of the tile.
  Words roll(int vector) const {
    return dice_.finish(hashes_[vector / 2 % PARTS], vector * LANES / 32 * 2 + vector % 2);
  }

 private:
  static constexpr int PARTS = 16 / LANES;

  const Dice& dice_;
  Words hashes_[PARTS];
};

}  // namespace
