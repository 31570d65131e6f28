// Moments in 8 bits: how the elements of a tile are read and written.
#pragma once

#include "arrays.h"

namespace {

// The vectors of a tile. A quad is four of them, whose codes fill one vector.
constexpr int VECTORS = TILE / LANES, QUADS = VECTORS / 4;

// The lower bits of an fp32 number that a moment does not keep.
template <Kind kind>
constexpr int LOST = is_code(kind) ? 20 : kind == BF16 ? 16 : 0;

// Rounds stochastically: up with a probability equal to the part that is lost. The result has no meaning in its lost
// bits. A bf16 moment needs the lower 16 random bits. Moments in 8 bits get the same random bits: the first takes the
// lower 20, the second the upper 20. What these have in common hardly changes a rounding of the second.
template <Kind kind>
inline Words rounded(Floats x, Words random) {
  if constexpr (LOST<kind> == 0) return bits(x);
  if constexpr (kind == BF16) return bits(x) + (random & 0xFFFFu);
  if constexpr (kind == SIGNED_CODES) return bits(x) + (random & 0xFFFFFu);
  return bits(x) + (random >> 12);
}

// The same for any x. From the largest finite value of the kind on, the lower bits are cut off instead: a finite value
// must not become inf. Inf and a canonical NaN have no lower bits.
template <Kind kind>
inline Words rounded_or_cut(Floats x, Words random) {
  constexpr uint32_t most = 0x7F800000u - (1u << LOST<kind>);
  return (bits(x) & 0x7FFFFFFFu) < most ? rounded<kind>(x, random) : bits(x);
}

template <Kind kind>
constexpr uint32_t LARGEST_CODE = kind == SIGNED_CODES ? 0x7F : 0xFF;

// Bits in pairs, for the arithmetic of codes. One object serves all tiles.
template <Kind kind>
struct Masks {
  Pairs number = pairs(LARGEST_CODE<kind> << 4);      // a code at its place in the upper half of an fp32 number
  Pairs upper_code = pairs(LARGEST_CODE<kind> << 8);  // a code in the upper byte
  Pairs upper_byte = pairs(0xFF00), sign = pairs(0x8000), signs = pairs(0x8080), one = pairs(0x20);

  static Pairs pairs(uint32_t x) { return Pairs{} + uint16_t(unknown(x)); }
};

// One moment of the elements of a tile.
//
// A code is a minifloat with 3 bits of mantissa: the upper bits of the fp32 number, minus the base of its tile. So a
// code becomes a number by an addition and a shift. The tile's scale is the largest exponent in it, one byte.
//
//   SIGNED_CODES    sign, 4 bits of exponent: 16 octaves below the largest element, then 0, stochastically
//   POSITIVE_CODES  5 bits of exponent: 32 octaves below the largest element, then the smallest code. A second moment
//                   that became 0 would make the update infinite, and one that is too large only makes it small.
//
// All numbers are bf16 numbers too. Signed code 0 is the number 0.
//
// Codes are computed from the upper halves of fp32 numbers, two in each lane, so that one instruction handles twice as
// many elements. The four codes in a lane are those of a quad's vectors 0 to 3.
template <Kind kind>
class Tile {
 public:
  Tile(const Arrays& arrays, int number, int64_t begin, const Masks<kind>& masks)
      : masks_(masks), codes_((uint8_t*)arrays.moments[number] + begin), scale_(arrays.scales[number] + begin / TILE) {}

  void read(int quad, Floats (&numbers)[4]) const {
    const Pairs codes = load_columns(codes_ + quad * 4 * LANES), base = pairs(base_of(*scale_) << 4);
    Pairs even = codes << 4 & masks_.number;  // of vectors 0 and 2
    Pairs odd = codes >> 4 & masks_.number;   // of vectors 1 and 3
    if constexpr (kind == SIGNED_CODES) {
      even = (even != 0 ? even + base : Pairs{}) | (codes << 8 & masks_.sign);
      odd = (odd != 0 ? odd + base : Pairs{}) | (codes & masks_.sign);
    } else {
      even += base, odd += base;
    }
    numbers[0] = floats((Words)even << 16), numbers[2] = floats((Words)even & 0xFFFF0000u);
    numbers[1] = floats((Words)odd << 16), numbers[3] = floats((Words)odd & 0xFFFF0000u);
  }

  // Keeps what `rounded` or `rounded_or_cut` returned. Memory is written by `finish`.
  void write(int quad, const Words (&rounded)[4]) {
    const Pairs even = upper_halves(rounded[0], rounded[2]), odd = upper_halves(rounded[1], rounded[3]);
    largest_ = larger(largest_, larger(magnitude(even), magnitude(odd)));
    upper_[2 * quad] = even, upper_[2 * quad + 1] = odd;
    if constexpr (kind == SIGNED_CODES) {
      for (int vector = 0; vector < 4; ++vector) rounded_[4 * quad + vector] = rounded[vector];
    }
  }

  // The largest magnitudes.
  Pairs largest() const { return largest_; }

  // The scale for a magnitude that is the largest of all. 255 if there is inf or NaN.
  static uint32_t scale_of(uint32_t largest) { return largest >> (PLACE + 3); }

  // Writes the scale and the codes.
  void finish(uint32_t scale) {
    const uint32_t base = base_of(scale);
    *scale_ = uint8_t(scale);
    for (int quad = 0; quad < QUADS; ++quad) {
      const Pairs even = upper_[2 * quad], odd = upper_[2 * quad + 1];
      const Pairs even_code = minus_or_zero(magnitude(even), pairs(base << PLACE));
      const Pairs odd_code = minus_or_zero(magnitude(odd), pairs(base << PLACE));
      Pairs codes = even_code >> PLACE | (odd_code << (8 - PLACE) & masks_.upper_code);
      if constexpr (kind == SIGNED_CODES) {
        codes |= (even >> 8 | (odd & masks_.upper_byte)) & masks_.signs;
        // With base 0, code 0 is exact. Many tiles are zeros: the rows of an embedding that no token has used.
        if (base != 0 && __builtin_expect(any_below(even_code, odd_code, masks_.one), false)) codes |= small_codes(quad, base);
      }
      store_columns(codes_ + quad * 4 * LANES, codes);
    }
  }

 private:
  static constexpr int PLACE = kind == SIGNED_CODES ? 5 : 4;  // of a code's lowest bit in a magnitude

  static Pairs pairs(uint32_t x) { return Pairs{} + uint16_t(x); }

  // Without the sign, which is shifted out.
  static Pairs magnitude(Pairs upper) { return kind == SIGNED_CODES ? upper + upper : upper; }

  // What is subtracted from the upper bits of a number. A tile's largest element gets a code near LARGEST_CODE.
  static uint32_t base_of(uint32_t scale) {
    constexpr uint32_t octaves = LARGEST_CODE<kind> >> 3;
    return ((scale > octaves ? scale : octaves) - octaves) << 3;
  }

  // Signed codes of numbers that are smaller than the number of code 1: without a sign 1 or 0. For others 0.
  Pairs small_codes(int quad, uint32_t base) const {
    const Floats step = floats((Words{} + (base + 1)) << LOST<kind>) * 0x1p-16f;
    const Words floor = (Words{} + base) << LOST<kind>;
    Words codes{};
    for (int vector = 0; vector < 4; ++vector) {
      const Words rounded = rounded_[4 * quad + vector], number = rounded & 0x7FFFFFFFu & (~0u << LOST<kind>);
      // The lowest bits are random. They do not tell whether the number was rounded up: higher ones do.
      const Floats chance = __builtin_convertvector((Integers)(rounded & 0xFFFFu), Floats) * step;
      const Words one = (Words)(number <= floor) & (Words)(floats(number) > chance) & 1u;
      codes |= one << 8 * vector;
    }
    return (Pairs)codes;
  }

  const Masks<kind>& masks_;
  uint8_t *codes_, *scale_;
  Pairs upper_[2 * QUADS], largest_{};
  Words rounded_[kind == SIGNED_CODES ? VECTORS : 1];
};

}  // namespace
