// One pass over a range: read gradient, master and moments; write master, moments and the 16-bit parameter.
#pragma once

#include "rounding.h"

namespace {

// A segment's arrays from some element on.
struct Arrays {
  const void* gradient;
  void* master;
  void* parameter;
  void* moments[2];
};

inline int64_t width(Kind kind) { return kind == ABSENT ? 0 : kind == FP32 ? 4 : 2; }

inline void* at(void* array, Kind kind, int64_t index) { return (char*)array + index * width(kind); }

inline Arrays arrays_from(const Segment& segment, int64_t offset) {
  return {at(segment.gradient, segment.gradient_kind, offset),
          at(segment.master, segment.master_kind, offset),
          at(segment.parameter, segment.parameter_kind, offset),
          {at(segment.moments[0], segment.moment_kinds[0], offset),
           at(segment.moments[1], segment.moment_kinds[1], offset)}};
}

inline Floats load_master(const Arrays& arrays, Kind kind, int64_t index) {
  if (kind == FP32) return load<Floats>((const float*)arrays.master + index);
  const Words low = widen((const uint16_t*)arrays.master + index);
  const Words high = widen((const uint16_t*)arrays.parameter + index);
  return floats((high << 16) + ((low ^ 0x8000u) - 0x8000u));  // low is signed
}

inline void store_master(const Arrays& arrays, Kind kind, Kind parameter_kind, int64_t index, Floats x) {
  uint16_t* parameter = (uint16_t*)arrays.parameter + index;
  const Words high = nearest_half(bits(x));
  if (kind == FP32) {
    store((float*)arrays.master + index, x);
  } else {
    narrow((uint16_t*)arrays.master + index, bits(x) - (high << 16));
  }
  if (parameter_kind == BF16) narrow(parameter, high);
  if (parameter_kind == FP16) to_fp16(parameter, x);
}

inline void store_moment(void* array, Kind kind, int64_t index, Floats x, Words random) {
  if (kind == FP32) {
    store((float*)array + index, x);
  } else {
    narrow((uint16_t*)array + index, stochastic_half(x, random));
  }
}

// torch.optim.Adam and AdamW, in their order of operations. `count` is a multiple of LANES.
void adam(const Segment& kinds, const Arrays& arrays, const Rule& rule, float factor, const Dice& dice,
          int64_t offset, int64_t count) {
  const bool rounds = kinds.moment_kinds[0] == BF16 || kinds.moment_kinds[1] == BF16;
  const float end_weight = 1.0f - rule.first_weight;
  for (int64_t index = 0; index < count; index += LANES) {
    Floats gradient = load_as_floats(arrays.gradient, kinds.gradient_kind, index) * factor;
    Floats master = load_master(arrays, kinds.master_kind, index);
    Floats first = load_as_floats(arrays.moments[0], kinds.moment_kinds[0], index);
    Floats second = load_as_floats(arrays.moments[1], kinds.moment_kinds[1], index);
    master = master * rule.shrink;
    if (rule.flags & DECAY_GRADIENT) gradient = gradient + rule.decay * master;
    if (rule.flags & LERP_FROM_END) {
      first = gradient - (gradient - first) * end_weight;
    } else {
      first = first + rule.first_weight * (gradient - first);
    }
    second = second * rule.keep + rule.second_weight * gradient * gradient;
    const Floats denominator = square_root(second) / rule.correction + rule.epsilon;
    master = canonical(master + rule.step_size * first / denominator);
    const Words random = rounds ? dice.roll(offset + index) : Words{};
    store_moment(arrays.moments[0], kinds.moment_kinds[0], index, canonical(first), random & 0xFFFFu);
    store_moment(arrays.moments[1], kinds.moment_kinds[1], index, canonical(second), random >> 16);
    store_master(arrays, kinds.master_kind, kinds.parameter_kind, index, master);
  }
}

// torch.optim.SGD, likewise. Without momentum there is no buffer.
void sgd(const Segment& kinds, const Arrays& arrays, const Rule& rule, float factor, const Dice& dice, int64_t offset,
         int64_t count) {
  const Kind buffer_kind = kinds.moment_kinds[0];
  for (int64_t index = 0; index < count; index += LANES) {
    Floats gradient = load_as_floats(arrays.gradient, kinds.gradient_kind, index) * factor;
    Floats master = load_master(arrays, kinds.master_kind, index);
    if (rule.flags & DECAY_GRADIENT) gradient = gradient + rule.decay * master;
    if (buffer_kind != ABSENT) {
      Floats buffer = gradient;
      if (!(rule.flags & FIRST)) {
        buffer = load_as_floats(arrays.moments[0], buffer_kind, index) * rule.keep + rule.first_weight * gradient;
      }
      gradient = rule.flags & NESTEROV ? gradient + rule.keep * buffer : buffer;
      const Words random = buffer_kind == BF16 ? dice.roll(offset + index) : Words{};
      store_moment(arrays.moments[0], buffer_kind, index, canonical(buffer), random & 0xFFFFu);
    }
    master = canonical(master + rule.step_size * gradient);
    store_master(arrays, kinds.master_kind, kinds.parameter_kind, index, master);
  }
}

void update_vectors(const Segment& segment, const Arrays& arrays, const Rule& rule, float factor, const Dice& dice,
                    int64_t offset, int64_t count) {
  if (rule.algorithm == ADAM) {
    adam(segment, arrays, rule, factor, dice, offset, count);
  } else {
    sgd(segment, arrays, rule, factor, dice, offset, count);
  }
}

// The last elements, fewer than a vector: the same code on copies, so that they get the same bits.
void update_tail(const Segment& segment, const Arrays& arrays, const Rule& rule, float factor, const Dice& dice,
                 int64_t offset, int64_t count) {
  alignas(64) char copies[5][4 * LANES] = {};
  const Arrays local = {copies[0], copies[1], copies[2], {copies[3], copies[4]}};
  const Kind* kinds = segment.moment_kinds;
  __builtin_memcpy(copies[0], arrays.gradient, count * width(segment.gradient_kind));
  __builtin_memcpy(copies[1], arrays.master, count * width(segment.master_kind));
  __builtin_memcpy(copies[2], arrays.parameter, count * width(segment.parameter_kind));
  __builtin_memcpy(copies[3], arrays.moments[0], count * width(kinds[0]));
  __builtin_memcpy(copies[4], arrays.moments[1], count * width(kinds[1]));
  update_vectors(segment, local, rule, factor, dice, offset, LANES);
  __builtin_memcpy(arrays.master, copies[1], count * width(segment.master_kind));
  __builtin_memcpy(arrays.parameter, copies[2], count * width(segment.parameter_kind));
  __builtin_memcpy(arrays.moments[0], copies[3], count * width(kinds[0]));
  __builtin_memcpy(arrays.moments[1], copies[4], count * width(kinds[1]));
}

void update_range(const Segment& segment, const Rule& rule, float factor, uint64_t seed, int64_t offset,
                  int64_t count) {
  const float sign = rule.flags & MAXIMIZE ? -1.0f : 1.0f;
  while (count > 0) {
    // The hash counts in 32 bits and takes the index's upper half as part of its key.
    const uint64_t index = uint64_t(segment.start + offset);
    const int64_t until_carry = int64_t(0x100000000u - (index & 0xFFFFFFFFu));
    const int64_t part = count < until_carry ? count : until_carry;
    const int64_t whole = part - part % LANES;
    const Dice dice(seed, segment.key, uint64_t(rule.step), index);
    update_vectors(segment, arrays_from(segment, offset), rule, sign * factor, dice, 0, whole);
    if (whole < part) {
      update_tail(segment, arrays_from(segment, offset + whole), rule, sign * factor, dice, whole, part - whole);
    }
    offset += part;
    count -= part;
  }
}

}  // namespace
