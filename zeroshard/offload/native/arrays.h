// The arrays that a pass reads and writes, and the master among them.
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

// The other inputs of a pass.
struct Pass {
  const Rule& rule;
  float factor;
  Dice dice;
  int64_t offset;  // elements between the start of the dice and the start of the arrays
};

// The kinds of a segment's arrays, as template arguments: the loop over elements then has no branches on them.
template <Kind gradient_, Kind master_, Kind parameter_, Kind first_, Kind second_>
struct Format {
  static constexpr Kind gradient = gradient_, master = master_, parameter = parameter_;
  static constexpr Kind first = first_, second = second_;
};

template <class Format>
inline Floats load_master(const Arrays& arrays, int64_t index) {
  if constexpr (Format::master == REMAINDER) {
    const Words high = widen_high((const uint16_t*)arrays.parameter + index);
    return floats(high + widen_signed((const uint16_t*)arrays.master + index));
  } else {
    return load<Floats>((const float*)arrays.master + index);
  }
}

template <class Format>
inline void store_master(const Arrays& arrays, int64_t index, Floats x) {
  uint16_t* parameter = (uint16_t*)arrays.parameter + index;
  if constexpr (Format::master == REMAINDER) {
    narrow_low((uint16_t*)arrays.master + index, bits(x));  // bits - (high << 16), in int16
  } else {
    store((float*)arrays.master + index, x);
  }
  if constexpr (Format::parameter == BF16) narrow_high(parameter, nearest(x));
  if constexpr (Format::parameter == FP16) to_fp16(parameter, x);
}

// The same for two vectors of a tile (lanes.h says in which order).
#if LANES == 4
template <Kind kind>
inline Couple load_couple(const void* array, int64_t index) {
  return {bits(load_as_floats<kind>(array, index)), bits(load_as_floats<kind>(array, index + LANES))};
}

template <class Format>
inline Couple load_master_couple(const Arrays& arrays, int64_t index) {
  return {bits(load_master<Format>(arrays, index)), bits(load_master<Format>(arrays, index + LANES))};
}

template <class Format>
inline void store_master_couple(const Arrays& arrays, int64_t index, Couple x) {
  store_master<Format>(arrays, index, floats(x.first));
  store_master<Format>(arrays, index + LANES, floats(x.second));
}
#else
template <Kind kind>
inline Couple load_couple(const void* array, int64_t index) {
  if constexpr (kind == BF16) return interleaved(Pairs{}, load<Pairs>((const uint16_t*)array + index));
  return coupled(bits(load_as_floats<kind>(array, index)), bits(load_as_floats<kind>(array, index + LANES)));
}

template <class Format>
inline Couple load_master_couple(const Arrays& arrays, int64_t index) {
  if constexpr (Format::master == REMAINDER) {
    const Pairs low = load<Pairs>((const uint16_t*)arrays.master + index);
    return interleaved(low, load<Pairs>((const uint16_t*)arrays.parameter + index) - (low >> 15));
  } else {
    return load_couple<FP32>(arrays.master, index);
  }
}

template <class Format>
inline void store_master_couple(const Arrays& arrays, int64_t index, Couple x) {
  uint16_t* parameter = (uint16_t*)arrays.parameter + index;
  if constexpr (Format::master == REMAINDER) {
    const HalfWords halves = separated(x);
    store((uint16_t*)arrays.master + index, halves.low);
    store(parameter, halves.high + (halves.low >> 15));  // nearest()
  } else {
    const Couple masters = natural(x);
    store((float*)arrays.master + index, masters.first);
    store((float*)arrays.master + index + LANES, masters.second);
    if constexpr (Format::parameter == BF16) {
      store(parameter, separated({nearest(floats(x.first)), nearest(floats(x.second))}).high);
    }
    if constexpr (Format::parameter == FP16) {
      to_fp16(parameter, floats(masters.first));
      to_fp16(parameter + LANES, floats(masters.second));
    }
  }
}
#endif

}  // namespace
