// Moments in 8 bits: how one group of elements is read, rounded and written.
#pragma once

#include "rounding.h"

namespace {

// The arrays of a segment, from some element on.
struct Arrays {
  const void* gradient;
  void* master;
  void* parameter;
  void* moments[2];
  uint8_t* scales[2];
};

// The number of elements that a loop handles before it writes their moments: one vector, or a tile of codes.
template <Kind kind>
constexpr int64_t GROUP = is_code(kind) ? int64_t(TILE) : int64_t(LANES);

// The lower bits of an fp32 number that a moment does not keep.
template <Kind kind>
constexpr int LOST = is_code(kind) ? 20 : kind == BF16 ? 16 : 0;

// Rounds stochastically: up with a probability equal to the part that is lost. Uses the lower half of the random bits.
// The result has no meaning in its lost bits.
template <Kind kind>
inline Words rounded(Floats x, Words random) {
  if constexpr (LOST<kind> == 0) return bits(x);
  if constexpr (LOST<kind> == 16) return bits(x) + (random & 0xFFFFu);
  return bits(x) + ((random << 4 & 0xFFFF0u) | 8u);
}

// The same for any x. From the largest finite value of the kind on, the lower bits are cut off instead: a finite value
// must not become inf. Inf and a canonical NaN have no lower bits.
template <Kind kind>
inline Words rounded_or_cut(Floats x, Words random) {
  constexpr uint32_t most = 0x7F800000u - (1u << LOST<kind>);
  return (bits(x) & 0x7FFFFFFFu) < most ? rounded<kind>(x, random) : bits(x);
}

// One moment of the elements of a group.
template <Kind kind>
class Moment {
 public:
  Moment(const Arrays& arrays, int number, int64_t) : array_(arrays.moments[number]) {}

  Floats read(int64_t index) const { return load_as_floats<kind>(array_, index); }

  // `rounded` is what the function above returned.
  void write(int64_t index, Words rounded) const {
    if constexpr (kind == BF16) {
      narrow_high((uint16_t*)array_ + index, rounded);
    } else {
      store((float*)array_ + index, rounded);
    }
  }

  void finish() const {}

 private:
  void* array_;
};

// A code is a minifloat with 3 bits of mantissa: the upper bits of the fp32 number, minus the base of its tile. So a
// code becomes a number by an addition and a shift. The tile's scale is the largest exponent in it, one byte.
//
//   SIGNED_CODES    sign, 4 bits of exponent: 16 octaves below the largest element, then 0, stochastically
//   POSITIVE_CODES  5 bits of exponent: 32 octaves below the largest element, then the smallest code. A second moment
//                   that became 0 would make the update infinite, and one that is too large only makes it small.
//
// All numbers are bf16 numbers too. Signed code 0 is the number 0.
template <Kind kind>
class Codes {
 public:
  Codes(const Arrays& arrays, int number, int64_t begin)
      : codes_((uint8_t*)arrays.moments[number] + begin),
        scale_(arrays.scales[number] + begin / TILE),
        begin_(begin),
        base_(base(Words{} + *scale_)) {}

  Floats read(int64_t index) const {
    const Words code = widen_bytes(codes_ + (index - begin_));
    if constexpr (kind == POSITIVE_CODES) return floats((code + base_) << LOST<kind>);
    const Words magnitude = code & LARGEST, number = (magnitude + base_) << LOST<kind>;
    return floats((magnitude != 0 ? number : magnitude) | (code << 24 & SIGN));
  }

  void write(int64_t index, Words rounded) {
    rounded_[(index - begin_) / LANES] = rounded;
    const Words magnitude = kind == SIGNED_CODES ? rounded & ~SIGN : rounded;
    largest_ = magnitude > largest_ ? magnitude : largest_;
  }

  // Finds the scale, and writes the codes.
  void finish() {
    const Words scale = largest_lane(largest_) >> 23;
    base_ = base(scale);
    *scale_ = uint8_t(scale[0]);
    const Floats smallest = floats((base_ + 1) << LOST<kind>) * 0x1p-16f;
    for (int vector = 0; vector < TILE / LANES; vector += 4) {
      Integers codes[4];
#pragma GCC unroll 4
      for (int number = 0; number < 4; ++number) codes[number] = code_of(rounded_[vector + number], smallest);
      narrow_bytes(codes_ + vector * LANES, codes);
    }
  }

 private:
  static constexpr uint32_t LARGEST = kind == SIGNED_CODES ? 0x7F : 0xFF;
  static constexpr uint32_t SIGN = 0x80000000u;

  // What is subtracted from the upper bits of a number. The largest element of a tile gets a code near LARGEST.
  static Words base(Words scale) {
    const Words octaves = Words{} + (LARGEST >> 3);
    return ((scale > octaves ? scale : octaves) - octaves) << 3;
  }

  // Below 0: the smallest code. `smallest` is the number of code 1, divided by 2^16.
  Integers code_of(Words rounded, Floats smallest) const {
    if constexpr (kind == POSITIVE_CODES) return (Integers)((rounded >> LOST<kind>)-base_);
    const Words magnitude = rounded & ~SIGN & (~0u << LOST<kind>), floor = base_ << LOST<kind>, large = magnitude > floor;
    Words code = (magnitude - floor) >> LOST<kind>;
    if (__builtin_expect(!all(large), false)) {
      // The lowest bits are random. They do not tell whether the number was rounded up: higher ones do.
      const Floats chance = __builtin_convertvector((Integers)(rounded & 0xFFFFu), Floats) * smallest;
      code = large ? code : (Words)(floats(magnitude) > chance) & 1u;
    }
    return (Integers)(code | (rounded >> 24 & 0x80u));
  }

  uint8_t *codes_, *scale_;
  int64_t begin_;
  Words base_;
  Words rounded_[TILE / LANES];
  Words largest_{};
};

template <>
class Moment<SIGNED_CODES> : public Codes<SIGNED_CODES> {
  using Codes::Codes;
};

template <>
class Moment<POSITIVE_CODES> : public Codes<POSITIVE_CODES> {
  using Codes::Codes;
};

}  // namespace
