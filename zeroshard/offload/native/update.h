// One pass over a range: read gradient, master and moments; write master, moments and the 16-bit parameter.
#pragma once

#include "tiles.h"

namespace {

template <Kind kind>
inline void store_rounded(void* array, int64_t index, Words rounded) {
  if constexpr (kind == BF16) {
    narrow_high((uint16_t*)array + index, rounded);
  } else {
    store((float*)array + index, rounded);
  }
}

// torch.optim.Adam and AdamW, with torch's order of operations. `count` is a multiple of LANES.
template <class Format>
void adam(const Arrays arrays, const Pass& pass, int64_t count) {
  constexpr Kind first_kind = Format::first, second_kind = Format::second;
  constexpr bool rounds = LOST<first_kind> > 0 || LOST<second_kind> > 0;
  const Rule rule = pass.rule;
  const Dice dice = pass.dice;
  const float factor = pass.factor, complement = 1.0f - rule.first_weight;
  for (int64_t index = 0; index < count; index += LANES) {
    Floats gradient = load_as_floats<Format::gradient>(arrays.gradient, index) * factor;
    Floats master = load_master<Format>(arrays, index) * rule.shrink;
    Floats first = load_as_floats<first_kind>(arrays.moments[0], index);
    Floats second = load_as_floats<second_kind>(arrays.moments[1], index);
    if (rule.flags & DECAY_GRADIENT) gradient = gradient + rule.decay * master;
    if (rule.flags & LERP_FROM_END) {
      first = gradient - (gradient - first) * complement;
    } else {
      first = first + rule.first_weight * (gradient - first);
    }
    second = second * rule.retention + rule.second_weight * gradient * gradient;
    const Floats denominator = square_root(second) / rule.correction + rule.epsilon;
    master = master + rule.step_size * first / denominator;
    Words low{}, high{};  // random bits
    if constexpr (rounds) {
      const Words random = dice.roll(pass.offset + index);
      low = random, high = random >> 16;
    }
    Words rounded_first = rounded<first_kind>(first, low);
    Words rounded_second = rounded<second_kind>(second, high);
    bool rare = has_nan(master);  // if a moment is NaN, the master is NaN too
    if constexpr (LOST<first_kind> > 0) rare |= has_special(rounded_first);
    if constexpr (LOST<second_kind> > 0) rare |= has_special(rounded_second);
    if (__builtin_expect(rare, false)) {
      master = canonical(master), first = canonical(first), second = canonical(second);
      rounded_first = rounded_or_cut<first_kind>(first, low);
      rounded_second = rounded_or_cut<second_kind>(second, high);
    }
    store_rounded<first_kind>(arrays.moments[0], index, rounded_first);
    store_rounded<second_kind>(arrays.moments[1], index, rounded_second);
    store_master<Format>(arrays, index, master);
  }
}

// torch.optim.SGD, with torch's order of operations. Without momentum there is no buffer.
template <class Format>
void sgd(const Arrays arrays, const Pass& pass, int64_t count) {
  constexpr bool has_momentum = Format::first != ABSENT;
  constexpr Kind kind = has_momentum ? Format::first : FP32;
  const Rule rule = pass.rule;
  const Dice dice = pass.dice;
  const float factor = pass.factor;
  for (int64_t index = 0; index < count; index += LANES) {
    Floats gradient = load_as_floats<Format::gradient>(arrays.gradient, index) * factor;
    Floats master = load_master<Format>(arrays, index);
    if (rule.flags & DECAY_GRADIENT) gradient = gradient + rule.decay * master;
    if constexpr (has_momentum) {
      Floats buffer = gradient;
      if (!(rule.flags & FIRST)) {
        buffer = load_as_floats<kind>(arrays.moments[0], index) * rule.retention + rule.first_weight * gradient;
      }
      gradient = rule.flags & NESTEROV ? gradient + rule.retention * buffer : buffer;
      buffer = canonical(buffer);
      Words random{};
      if constexpr (LOST<kind> > 0) random = dice.roll(pass.offset + index);
      store_rounded<kind>(arrays.moments[0], index, rounded_or_cut<kind>(buffer, random));
    }
    store_master<Format>(arrays, index, canonical(master + rule.step_size * gradient));
  }
}

typedef void Loop(const Arrays, const Pass&, int64_t count);

// The functions below choose the loop for a segment, one argument of Format after the other.
template <Kind gradient, Kind master, Kind parameter>
Loop* loop_for_moments(Algorithm algorithm, const Kind* moments) {
  if (algorithm == ADAM) {
    if (is_code(moments[0])) return update_tiles<Format<gradient, master, parameter, SIGNED_CODES, POSITIVE_CODES>>;
    if (moments[0] == FP32) {
      return moments[1] == FP32 ? adam<Format<gradient, master, parameter, FP32, FP32>>
                                : adam<Format<gradient, master, parameter, FP32, BF16>>;
    }
    return moments[1] == FP32 ? adam<Format<gradient, master, parameter, BF16, FP32>>
                              : adam<Format<gradient, master, parameter, BF16, BF16>>;
  }
  if (moments[0] == FP32) return sgd<Format<gradient, master, parameter, FP32, ABSENT>>;
  if (moments[0] == BF16) return sgd<Format<gradient, master, parameter, BF16, ABSENT>>;
  if (is_code(moments[0])) return update_tiles<Format<gradient, master, parameter, SIGNED_CODES, ABSENT>>;
  return sgd<Format<gradient, master, parameter, ABSENT, ABSENT>>;
}

template <Kind gradient>
Loop* loop_for_master(const Segment& segment, Algorithm algorithm) {
  const Kind* moments = segment.moment_kinds;
  if (segment.master_kind == REMAINDER) return loop_for_moments<gradient, REMAINDER, BF16>(algorithm, moments);
  if (segment.parameter_kind == BF16) return loop_for_moments<gradient, FP32, BF16>(algorithm, moments);
  if (segment.parameter_kind == FP16) return loop_for_moments<gradient, FP32, FP16>(algorithm, moments);
  return loop_for_moments<gradient, FP32, ABSENT>(algorithm, moments);
}

Loop* loop_for(const Segment& segment, Algorithm algorithm) {
  if (segment.gradient_kind == BF16) return loop_for_master<BF16>(segment, algorithm);
  if (segment.gradient_kind == FP16) return loop_for_master<FP16>(segment, algorithm);
  return loop_for_master<FP32>(segment, algorithm);
}

int64_t width(Kind kind) { return kind == ABSENT ? 0 : kind == FP32 ? 4 : is_code(kind) ? 1 : 2; }

void* at(void* array, Kind kind, int64_t index) { return (char*)array + index * width(kind); }

Arrays arrays_from(const Segment& segment, int64_t offset) {
  return {at(segment.gradient, segment.gradient_kind, offset),
          at(segment.master, segment.master_kind, offset),
          at(segment.parameter, segment.parameter_kind, offset),
          {at(segment.moments[0], segment.moment_kinds[0], offset),
           at(segment.moments[1], segment.moment_kinds[1], offset)},
          {segment.scales[0] + offset / TILE, segment.scales[1] + offset / TILE}};
}

void copy(void* to, const void* from, Kind kind, int64_t count) {
  if (kind != ABSENT) __builtin_memcpy(to, from, count * width(kind));
}

int64_t group_of(const Segment& segment) { return is_code(segment.moment_kinds[0]) ? TILE : LANES; }

// The last elements, fewer than a group. The same loop runs on padded copies, so that they get the same bits.
void update_tail(Loop* loop, const Segment& segment, const Arrays& arrays, const Pass& pass, int64_t count) {
  alignas(64) char copies[5][4 * TILE] = {};
  const Arrays local = {copies[0], copies[1], copies[2], {copies[3], copies[4]}, {arrays.scales[0], arrays.scales[1]}};
  const Kind* moments = segment.moment_kinds;
  copy(copies[0], arrays.gradient, segment.gradient_kind, count);
  copy(local.master, arrays.master, segment.master_kind, count);
  copy(local.parameter, arrays.parameter, segment.parameter_kind, count);
  for (int index = 0; index < 2; ++index) copy(local.moments[index], arrays.moments[index], moments[index], count);
  loop(local, pass, group_of(segment));
  copy(arrays.master, local.master, segment.master_kind, count);
  copy(arrays.parameter, local.parameter, segment.parameter_kind, count);
  for (int index = 0; index < 2; ++index) copy(arrays.moments[index], local.moments[index], moments[index], count);
}

void update_range(const Segment& segment, const Rule& rule, float factor, uint64_t seed, int64_t offset,
                  int64_t count) {
  Loop* loop = loop_for(segment, rule.algorithm);
  const float signed_factor = rule.flags & MAXIMIZE ? -factor : factor;
  while (count > 0) {
    // The dice count in 32 bits, and the upper half of the index is part of their key. So a pass ends at a carry.
    const uint64_t index = uint64_t(segment.start + offset);
    const int64_t until_carry = int64_t(0x100000000u - (index & 0xFFFFFFFFu));
    const int64_t part = count < until_carry ? count : until_carry;
    const int64_t whole = part - part % group_of(segment);
    Pass pass = {rule, signed_factor, Dice(seed, segment.key, uint64_t(rule.step), index), 0};
    loop(arrays_from(segment, offset), pass, whole);
    if (whole < part) {
      pass.offset = whole;
      update_tail(loop, segment, arrays_from(segment, offset + whole), pass, part - whole);
    }
    offset += part;
    count -= part;
  }
}

}  // namespace
