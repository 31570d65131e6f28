// The update with moments in 8 bits, a tile at a time.
//
// A tile is computed as if it had no inf and no NaN, which costs less. Nothing is written before the results show that
// this was right. Otherwise the tile is computed again, carefully.
#pragma once

#include "codes.h"

// GCC would call a function of this size, and prepare its constants in each call.
#define INLINE __attribute__((always_inline)) inline

namespace {

// Quads in one iteration. With AVX2 two are quicker, on the portable path more would only take longer to compile.
constexpr int UNROLLED = LANES == 8 ? 2 : 1;

struct BothMasks {
  Masks<SIGNED_CODES> first;
  Masks<POSITIVE_CODES> second;
};

// Whether the results of a tile have inf or NaN among the moments or NaN among the masters.
inline bool is_special(const Floats (&masters)[VECTORS], uint32_t first_scale, uint32_t second_scale) {
  return __builtin_expect(any_nan(masters) | (first_scale == 255) | (second_scale == 255), false);
}

template <Kind kind, bool careful>
inline Words rounded_in_tile(Floats x, Words random) {
  if constexpr (careful) return rounded_or_cut<kind>(canonical(x), random);
  return rounded<kind>(x, random);
}

template <class Format>
inline void read_quad(const Arrays& arrays, int64_t index, Floats* gradients, Floats* masters) {
  for (int vector = 0; vector < 4; vector += 2) {
    const Couple gradient = load_couple<Format::gradient>(arrays.gradient, index + vector * LANES);
    const Couple master = load_master_couple<Format>(arrays, index + vector * LANES);
    gradients[vector] = floats(gradient.first), gradients[vector + 1] = floats(gradient.second);
    masters[vector] = floats(master.first), masters[vector + 1] = floats(master.second);
  }
}

template <class Format, bool careful>
inline void store_masters(const Arrays& arrays, int64_t begin, const Floats (&masters)[VECTORS]) {
  for (int vector = 0; vector < VECTORS; vector += 2) {
    const Floats first = masters[vector], second = masters[vector + 1];
    const Couple couple = {bits(careful ? canonical(first) : first), bits(careful ? canonical(second) : second)};
    store_master_couple<Format>(arrays, begin + vector * LANES, couple);
  }
}

// torch.optim.Adam and AdamW, but not with torch's order of operations: numerator and denominator of the update are
// multiplied with the correction, so that there is one division. False if nothing was written because of special values.
template <class Format, bool careful>
INLINE bool adam_tile(const Arrays& arrays, const Pass& pass, const Rule& rule, const BothMasks& masks,
                      int64_t begin) {
  const float step_size = rule.step_size * rule.correction, epsilon = rule.epsilon * rule.correction;
  const float first_retention = 1.0f - rule.first_weight;
  const TileDice dice(pass.dice, pass.offset + begin);
  Tile<SIGNED_CODES> firsts(arrays, 0, begin, masks.first);
  Tile<POSITIVE_CODES> seconds(arrays, 1, begin, masks.second);
  Floats masters[VECTORS];
#pragma GCC unroll UNROLLED
  for (int quad = 0; quad < QUADS; ++quad) {
    Floats gradients[4], first[4], second[4];
    Words rounded_first[4], rounded_second[4];
    read_quad<Format>(arrays, begin + quad * 4 * LANES, gradients, masters + 4 * quad);
    firsts.read(quad, first);
    seconds.read(quad, second);
    for (int number = 0; number < 4; ++number) {
      const int vector = 4 * quad + number;
      Floats gradient = gradients[number] * pass.factor;
      const Floats master = masters[vector] * rule.shrink;
      if (rule.flags & DECAY_GRADIENT) gradient = gradient + rule.decay * master;
      first[number] = first[number] * first_retention + gradient * rule.first_weight;
      second[number] = second[number] * rule.retention + rule.second_weight * gradient * gradient;
      masters[vector] = master + step_size * first[number] / (square_root(second[number]) + epsilon);
      const Words random = dice.roll(vector);
      rounded_first[number] = rounded_in_tile<SIGNED_CODES, careful>(first[number], random);
      rounded_second[number] = rounded_in_tile<POSITIVE_CODES, careful>(second[number], random);
    }
    firsts.write(quad, rounded_first);
    seconds.write(quad, rounded_second);
  }
  const uint32_t largest = largest_of_each(firsts.largest(), seconds.largest());
  const uint32_t first_scale = firsts.scale_of(largest & 0xFFFF), second_scale = seconds.scale_of(largest >> 16);
  if (!careful && is_special(masters, first_scale, second_scale)) return false;
  store_masters<Format, careful>(arrays, begin, masters);
  firsts.finish(first_scale);
  seconds.finish(second_scale);
  return true;
}

// torch.optim.SGD with momentum.
template <class Format, bool careful>
INLINE bool sgd_tile(const Arrays& arrays, const Pass& pass, const Rule& rule, const BothMasks& masks, int64_t begin) {
  const TileDice dice(pass.dice, pass.offset + begin);
  Tile<SIGNED_CODES> momenta(arrays, 0, begin, masks.first);
  Floats masters[VECTORS];
#pragma GCC unroll UNROLLED
  for (int quad = 0; quad < QUADS; ++quad) {
    Floats gradients[4], momentum[4];
    Words rounded_momentum[4];
    read_quad<Format>(arrays, begin + quad * 4 * LANES, gradients, masters + 4 * quad);
    momenta.read(quad, momentum);
    for (int number = 0; number < 4; ++number) {
      const int vector = 4 * quad + number;
      Floats gradient = gradients[number] * pass.factor;
      const Floats master = masters[vector];
      if (rule.flags & DECAY_GRADIENT) gradient = gradient + rule.decay * master;
      Floats buffer = gradient;
      if (!(rule.flags & FIRST)) buffer = momentum[number] * rule.retention + rule.first_weight * gradient;
      gradient = rule.flags & NESTEROV ? gradient + rule.retention * buffer : buffer;
      masters[vector] = master + rule.step_size * gradient;
      rounded_momentum[number] = rounded_in_tile<SIGNED_CODES, careful>(buffer, dice.roll(vector));
    }
    momenta.write(quad, rounded_momentum);
  }
  const uint32_t scale = momenta.scale_of(largest_of_each(momenta.largest(), Pairs{}));
  if (!careful && is_special(masters, scale, 0)) return false;
  store_masters<Format, careful>(arrays, begin, masters);
  momenta.finish(scale);
  return true;
}

// A function of its own, so that the compiler allots registers to the loop over ordinary tiles alone.
template <class Format>
__attribute__((noinline, cold))
void special_tile(const Arrays& arrays, const Pass& pass, const BothMasks& masks, int64_t begin) {
  if constexpr (Format::second == ABSENT) {
    sgd_tile<Format, true>(arrays, pass, pass.rule, masks, begin);
  } else {
    adam_tile<Format, true>(arrays, pass, pass.rule, masks, begin);
  }
}

// `count` is a multiple of a tile.
template <class Format>
void update_tiles(const Arrays arrays, const Pass& given, int64_t count) {
  const Rule rule = given.rule;
  const Pass pass = given;
  const BothMasks masks;
  for (int64_t begin = 0; begin < count; begin += TILE) {
    bool done;
    if constexpr (Format::second == ABSENT) {
      done = sgd_tile<Format, false>(arrays, pass, rule, masks, begin);
    } else {
      done = adam_tile<Format, false>(arrays, pass, rule, masks, begin);
    }
    if (!done) special_tile<Format>(arrays, given, masks, begin);
  }
}

}  // namespace
