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
typedef uint8_t Bytes __attribute__((vector_size(LANES)));

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
#elif LANES == 8
inline __m256i byte_numbers(int first) {  // bytes `first` and `first` + 1 of every word, four words at a time
  const __m128i numbers = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 0, 1, 4, 5, 8, 9, 12, 13);
  return _mm256_broadcastsi128_si256(_mm_add_epi8(numbers, _mm_set1_epi8(char(first))));
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

inline Words widen_bytes(const uint8_t* from) {
#if LANES == 16
  return (Words)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from));
#elif LANES == 8
  return (Words)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from));
#else
  return __builtin_convertvector(load<Bytes>(from), Words);
#endif
}

inline void narrow_bytes(uint8_t* to, const Integers (&x)[4]) {  // four vectors of at most 255; below 0 becomes 0
#if LANES == 16
  const __m512i low = _mm512_packus_epi32((__m512i)x[0], (__m512i)x[1]);
  const __m512i high = _mm512_packus_epi32((__m512i)x[2], (__m512i)x[3]);
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  _mm512_storeu_si512(to, _mm512_permutexvar_epi32(order, _mm512_packus_epi16(low, high)));
#elif LANES == 8
  const __m256i low = _mm256_packus_epi32((__m256i)x[0], (__m256i)x[1]);
  const __m256i high = _mm256_packus_epi32((__m256i)x[2], (__m256i)x[3]);
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  _mm256_storeu_si256((__m256i*)to, _mm256_permutevar8x32_epi32(_mm256_packus_epi16(low, high), order));
#else
  for (int number = 0; number < 4; ++number) {
    store(to + number * LANES, __builtin_convertvector(x[number] > 0 ? x[number] : Integers{}, Bytes));
  }
#endif
}

inline Words largest_lane(Words x) {  // in every lane
#if LANES == 16
  __m512i y = (__m512i)x;
  y = _mm512_max_epu32(y, _mm512_shuffle_i64x2(y, y, 0x4E));
  y = _mm512_max_epu32(y, _mm512_shuffle_i64x2(y, y, 0xB1));
  y = _mm512_max_epu32(y, _mm512_shuffle_epi32(y, _MM_PERM_BADC));
  return (Words)_mm512_max_epu32(y, _mm512_shuffle_epi32(y, _MM_PERM_CDAB));
#elif LANES == 8
  __m256i y = (__m256i)x;
  y = _mm256_max_epu32(y, _mm256_permute2x128_si256(y, y, 1));
  y = _mm256_max_epu32(y, _mm256_shuffle_epi32(y, 0x4E));
  return (Words)_mm256_max_epu32(y, _mm256_shuffle_epi32(y, 0xB1));
#else
  uint32_t largest = 0;
  for (int lane = 0; lane < LANES; ++lane) largest = x[lane] > largest ? x[lane] : largest;
  return Words{} + largest;
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

inline bool all(Words x) {
#if LANES == 16
  return _mm512_movepi32_mask((__m512i)x) == 0xFFFF;
#elif LANES == 8
  return _mm256_movemask_ps((__m256)x) == 0xFF;
#else
  (void)x;
  return false;
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
