// Vectors of LANES elements, and the operations that a compiler's vector types lack.
//
// Each path includes this file with its own LANES and instruction set. Everything is in an unnamed namespace: if paths
// shared a function, the linker could choose the copy with instructions that the processor does not have.
#pragma once

#include <stdint.h>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef int32_t Integers __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));
typedef uint16_t Pairs __attribute__((vector_size(4 * LANES)));  // two 16-bit numbers in each lane
typedef uint8_t Bytes __attribute__((vector_size(LANES)));

struct Couple {  // two vectors of a tile
  Words first, second;
};

template <class Vector>
inline Vector load(const void* from) {
  Vector vector;
  __builtin_memcpy(&vector, from, sizeof vector);
  return vector;
}

template <class Vector>
inline void store(void* to, Vector vector) {
  __builtin_memcpy(to, &vector, sizeof vector);
}

// The same number, of which the compiler knows nothing. GCC makes a vector of a known number anew wherever a loop uses
// it, with instructions that compete with the arithmetic. A vector of an unknown number is made once, before the loop.
inline uint32_t unknown(uint32_t number) {
  const volatile uint32_t memory = number;
  return memory;
}

// A cast between vectors of the same size does not change the bits.
inline Words bits(Floats x) { return (Words)x; }
inline Floats floats(Words x) { return (Floats)x; }

// Conversions between 16-bit elements and the halves of 32-bit words. They are written with intrinsics: compilers use
// several shifts and conversions where one shuffle is enough, and all of these compete with square roots and divisions
// for the same units of the processor.
#if LANES == 16
inline __m512i word_numbers(int first, int step) {  // numbers of 16-bit words in a vector: first, first + step, ...
  const __m512i count = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  return _mm512_add_epi32(_mm512_mullo_epi32(count, _mm512_set1_epi32(step)), _mm512_set1_epi32(first));
}

inline __m512i transposed(__m512i bytes) {  // every 16 bytes as a matrix of four rows
  const __m128i order = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return _mm512_shuffle_epi8(bytes, _mm512_broadcast_i32x4(order));
}

inline __m512i halves_apart(__m512i words) {  // of every four words: first the lower halves, then the upper halves
  const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
  return _mm512_shuffle_epi8(words, _mm512_broadcast_i32x4(order));
}
#elif LANES == 8
inline __m256i byte_numbers(int first) {  // bytes `first` and `first` + 1 of every word, four words at a time
  const __m128i numbers = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 0, 1, 4, 5, 8, 9, 12, 13);
  return _mm256_broadcastsi128_si256(_mm_add_epi8(numbers, _mm_set1_epi8(char(first))));
}

inline __m256i transposed(__m256i bytes) {  // every 16 bytes as a matrix of four rows
  const __m128i order = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return _mm256_shuffle_epi8(bytes, _mm256_broadcastsi128_si256(order));
}

inline __m256i halves_apart(__m256i words) {  // of every four words: first the lower halves, then the upper halves
  const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
  return _mm256_shuffle_epi8(words, _mm256_broadcastsi128_si256(order));
}
#endif

inline Words widen_low(const uint16_t* from) {  // into the lower halves, zeros above
  return __builtin_convertvector(load<Halves>(from), Words);
}

inline Words widen_signed(const uint16_t* from) {  // into the lower halves, the sign above
#if LANES == 16
  return (Words)_mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i*)from));
#elif LANES == 8
  return (Words)_mm256_cvtepi16_epi32(_mm_loadu_si128((const __m128i*)from));
#else
  return (widen_low(from) ^ 0x8000u) - 0x8000u;
#endif
}

inline Words widen_high(const uint16_t* from) {  // into the upper halves, zeros below
#if LANES == 16
  const __m512i halves = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)from));
  const __m512i sources = _mm512_slli_epi32(word_numbers(0, 1), 16);
  return (Words)_mm512_maskz_permutexvar_epi16(0xAAAAAAAAu, sources, halves);
#else
  return widen_low(from) << 16;
#endif
}

inline void narrow_low(uint16_t* to, Words x) {  // from the lower halves
#if LANES == 16
  _mm256_storeu_si256((__m256i*)to, _mm512_cvtepi32_epi16((__m512i)x));
#elif LANES == 8
  const __m256i packed = _mm256_shuffle_epi8((__m256i)x, byte_numbers(0));
  _mm_storeu_si128((__m128i*)to, _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08)));
#else
  store(to, __builtin_convertvector(x, Halves));
#endif
}

inline void narrow_high(uint16_t* to, Words x) {  // from the upper halves
#if LANES == 16
  const __m512i sources = word_numbers(0x00030001, 0x00040004);  // 1, 3, 5, ... packed two by two
  _mm256_storeu_si256((__m256i*)to, _mm512_castsi512_si256(_mm512_permutexvar_epi16(sources, (__m512i)x)));
#elif LANES == 8
  const __m256i packed = _mm256_shuffle_epi8((__m256i)x, byte_numbers(2));
  _mm_storeu_si128((__m128i*)to, _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08)));
#else
  narrow_low(to, x >> 16);
#endif
}

// A tile's vectors do not have its elements in their order. Vectors come in couples: of every eight elements, the first
// of a couple has the first four and the second has the others. In this order each of the functions below is a single
// instruction for each vector, or two. With four lanes it is the natural order.
#if LANES > 4
inline Couple interleaved(Pairs low, Pairs high) {  // words from their lower and upper halves
#if LANES == 16
  return {(Words)_mm512_unpacklo_epi16((__m512i)low, (__m512i)high),
          (Words)_mm512_unpackhi_epi16((__m512i)low, (__m512i)high)};
#elif LANES == 8
  return {(Words)_mm256_unpacklo_epi16((__m256i)low, (__m256i)high),
          (Words)_mm256_unpackhi_epi16((__m256i)low, (__m256i)high)};
#endif
}

struct HalfWords {
  Pairs low, high;
};

inline HalfWords separated(Couple x) {  // the inverse
#if LANES == 16
  const __m512i first = halves_apart((__m512i)x.first), second = halves_apart((__m512i)x.second);
  return {(Pairs)_mm512_unpacklo_epi64(first, second), (Pairs)_mm512_unpackhi_epi64(first, second)};
#elif LANES == 8
  const __m256i first = halves_apart((__m256i)x.first), second = halves_apart((__m256i)x.second);
  return {(Pairs)_mm256_unpacklo_epi64(first, second), (Pairs)_mm256_unpackhi_epi64(first, second)};
#endif
}

inline Couple coupled(Words first, Words second) {  // from two vectors in the natural order
#if LANES == 16
  return {(Words)_mm512_shuffle_i32x4((__m512i)first, (__m512i)second, 0x88),
          (Words)_mm512_shuffle_i32x4((__m512i)first, (__m512i)second, 0xDD)};
#elif LANES == 8
  return {(Words)_mm256_permute2x128_si256((__m256i)first, (__m256i)second, 0x20),
          (Words)_mm256_permute2x128_si256((__m256i)first, (__m256i)second, 0x31)};
#endif
}

inline Couple natural(Couple x) {  // the inverse
#if LANES == 16
  const __m512i low = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), high = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
  return {(Words)_mm512_permutex2var_epi64((__m512i)x.first, low, (__m512i)x.second),
          (Words)_mm512_permutex2var_epi64((__m512i)x.first, high, (__m512i)x.second)};
#else
  return coupled(x.first, x.second);
#endif
}
#endif

// Bytes of four vectors' elements, as the bytes of words: the lowest byte belongs to the first vector.
inline Pairs load_columns(const uint8_t* from) {
#if LANES == 16
  const __m512i rows = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
  return (Pairs)transposed(_mm512_permutexvar_epi64(rows, _mm512_loadu_si512(from)));
#elif LANES == 8
  return (Pairs)transposed(_mm256_permute4x64_epi64(_mm256_loadu_si256((const __m256i*)from), 0xD8));
#else
  Words columns{};
  for (int row = 0; row < 4; ++row) {
    columns |= __builtin_convertvector(load<Bytes>(from + row * LANES), Words) << 8 * row;
  }
  return (Pairs)columns;
#endif
}

inline void store_columns(uint8_t* to, Pairs columns) {
#if LANES == 16
  const __m512i rows = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
  _mm512_storeu_si512(to, _mm512_permutexvar_epi64(rows, transposed((__m512i)columns)));
#elif LANES == 8
  _mm256_storeu_si256((__m256i*)to, _mm256_permute4x64_epi64(transposed((__m256i)columns), 0xD8));
#else
  for (int row = 0; row < 4; ++row) {
    store(to + row * LANES, __builtin_convertvector((Words)columns >> 8 * row & 0xFFu, Bytes));
  }
#endif
}

// The upper halves of two vectors' words: the lower half of word 0 is from `low`, the upper half from `high`.
inline Pairs upper_halves(Words low, Words high) {
#if LANES == 8
  return (Pairs)_mm256_blend_epi16((__m256i)(low >> 16), (__m256i)high, 0xAA);
#else
  return (Pairs)(low >> 16 | (high & 0xFFFF0000u));
#endif
}

inline Pairs larger(Pairs x, Pairs y) {
#if LANES == 16
  return (Pairs)_mm512_max_epu16((__m512i)x, (__m512i)y);
#elif LANES == 8
  return (Pairs)_mm256_max_epu16((__m256i)x, (__m256i)y);
#else
  return x > y ? x : y;
#endif
}

inline Pairs minus_or_zero(Pairs x, Pairs y) {  // x - y, and 0 where y is larger
#if LANES == 16
  return (Pairs)_mm512_subs_epu16((__m512i)x, (__m512i)y);
#elif LANES == 8
  return (Pairs)_mm256_subs_epu16((__m256i)x, (__m256i)y);
#else
  return larger(x, y) - y;
#endif
}

// The largest number of `x` in the lower half, and that of `y` in the upper half.
inline uint32_t largest_of_each(Pairs x, Pairs y) {
#if LANES == 16
  const __m512i low = _mm512_unpacklo_epi16((__m512i)x, (__m512i)y);
  const __m512i high = _mm512_unpackhi_epi16((__m512i)x, (__m512i)y);
  const __m512i all = _mm512_max_epu16(low, high);
  const __m256i half = _mm256_max_epu16(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
#elif LANES == 8
  const __m256i low = _mm256_unpacklo_epi16((__m256i)x, (__m256i)y);
  const __m256i high = _mm256_unpackhi_epi16((__m256i)x, (__m256i)y);
  const __m256i half = _mm256_max_epu16(low, high);
#endif
#if LANES >= 8
  __m128i four = _mm_max_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
  four = _mm_max_epu16(four, _mm_shuffle_epi32(four, 0x4E));
  return uint32_t(_mm_cvtsi128_si32(_mm_max_epu16(four, _mm_shuffle_epi32(four, 0xB1))));
#else
  uint16_t largest[2] = {};
  for (int lane = 0; lane < 2 * LANES; ++lane) {
    largest[0] = x[lane] > largest[0] ? x[lane] : largest[0];
    largest[1] = y[lane] > largest[1] ? y[lane] : largest[1];
  }
  return largest[0] | uint32_t(largest[1]) << 16;
#endif
}

inline Floats square_root(Floats x) {
#if LANES == 16
  return (Floats)_mm512_sqrt_ps((__m512)x);
#elif LANES == 8
  return (Floats)_mm256_sqrt_ps((__m256)x);
#else
  for (int lane = 0; lane < LANES; ++lane) x[lane] = __builtin_sqrtf(x[lane]);
  return x;
#endif
}

// fp16. The portable path has no instruction for it, and multiplies with powers of two, which is exact.
inline Floats from_fp16(const uint16_t* from) {
#if LANES == 16
  return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#elif LANES == 8
  return (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
#else
  const Words x = widen_low(from);
  const Words magnitude = (x & 0x7FFFu) << 13;
  const Words scaled = bits(floats(magnitude) * 0x1p112f);
  const Words special = magnitude | 0x7F800000u;  // inf and NaN: exponent 31
  return floats((magnitude >= (0x1Fu << 23) ? special : scaled) | (x & 0x8000u) << 16);
#endif
}

inline void to_fp16(uint16_t* to, Floats x) {  // rounds to nearest, ties to even; every NaN becomes a quiet NaN
#if LANES == 16
  _mm256_storeu_si256((__m256i*)to, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
#elif LANES == 8
  _mm_storeu_si128((__m128i*)to, _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
#else
  const Words magnitude = bits(x) & 0x7FFFFFFFu;
  const Words odd = magnitude >> 13 & 1u;
  const Words normal = (magnitude - (112u << 23) + 0xFFFu + odd) >> 13;
  // Below 2^-14: adding 0.5 rounds to a multiple of 2^-24 and leaves the multiple in the low bits.
  const Words denormal = bits(floats(magnitude) + 0.5f) - 0x3F000000u;
  Words half = magnitude < (113u << 23) ? denormal : normal;
  half = magnitude >= 0x477FF000u ? (Words{} + 0x7C00u) : half;  // 65520 and above
  half = magnitude > 0x7F800000u ? (Words{} + 0x7E00u) : half;
  narrow_low(to, half | (bits(x) >> 16 & 0x8000u));
#endif
}

template <Kind kind>
inline Floats load_as_floats(const void* array, int64_t index) {
  if constexpr (kind == BF16) {
    return floats(widen_high((const uint16_t*)array + index));
  } else if constexpr (kind == FP16) {
    return from_fp16((const uint16_t*)array + index);
  } else {
    return load<Floats>((const float*)array + index);
  }
}

// The bits of a NaN result depend on the compiler. Stored bits must not, so every stored NaN is the same one.
inline Floats canonical(Floats x) { return x == x ? x : floats(Words{} + 0x7FC00000u); }

// Whether a vector has values that need the slow code. The portable path always says yes: there the test costs more.
inline bool has_nan(Floats x) {
#if LANES == 16
  return _mm512_cmp_ps_mask((__m512)x, (__m512)x, _CMP_UNORD_Q) != 0;
#elif LANES == 8
  return _mm256_movemask_ps(_mm256_cmp_ps((__m256)x, (__m256)x, _CMP_UNORD_Q)) != 0;
#else
  (void)x;
  return true;
#endif
}

inline bool any(Pairs x) {  // whether a bit is set
#if LANES == 16
  return _mm512_test_epi32_mask((__m512i)x, (__m512i)x) != 0;
#elif LANES == 8
  return !_mm256_testz_si256((__m256i)x, (__m256i)x);
#else
  uint64_t halves[2];
  __builtin_memcpy(halves, &x, sizeof halves);
  return (halves[0] | halves[1]) != 0;
#endif
}

inline bool any_below(Pairs x, Pairs y, Pairs bounds) {
#if LANES == 16
  const __m512i smaller = _mm512_min_epu16((__m512i)x, (__m512i)y);
  return _mm512_cmplt_epu16_mask(smaller, (__m512i)bounds) != 0;
#elif LANES == 8
  const __m256i smaller = _mm256_min_epu16((__m256i)x, (__m256i)y);
  return _mm256_movemask_epi8(_mm256_cmpeq_epi16(_mm256_max_epu16(smaller, (__m256i)bounds), smaller)) != -1;
#else
  return any((Pairs)((x < bounds) | (y < bounds)));
#endif
}

template <int count>
inline bool any_nan(const Floats (&x)[count]) {
#if LANES == 16
  static_assert(count == 4, "the vectors of a tile");
  const __mmask16 low = _mm512_cmp_ps_mask((__m512)x[0], (__m512)x[1], _CMP_UNORD_Q);
  return !_mm512_kortestz(low, _mm512_cmp_ps_mask((__m512)x[2], (__m512)x[3], _CMP_UNORD_Q));
#else
  Pairs found{};
  for (int number = 0; number < count; number += 2) {
#if LANES == 8
    found |= (Pairs)_mm256_cmp_ps((__m256)x[number], (__m256)x[number + 1], _CMP_UNORD_Q);
#else
    found |= (Pairs)((x[number] != x[number]) | (x[number + 1] != x[number + 1]));
#endif
  }
  return any(found);
#endif
}

inline bool has_special(Words x) {  // inf or NaN
#if LANES == 16
  return _mm512_fpclass_ps_mask((__m512)x, 0x99) != 0;
#elif LANES == 8
  const __m256i exponents = _mm256_set1_epi32(0x7F800000);
  const __m256i full = _mm256_cmpeq_epi32(_mm256_and_si256((__m256i)x, exponents), exponents);
  return _mm256_movemask_ps((__m256)full) != 0;
#else
  (void)x;
  return true;
#endif
}

}  // namespace
