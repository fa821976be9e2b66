// Vectors of kBytes bytes, by the vector extension of GCC and clang: no intrinsics, so every architecture compiles
// them.
//
// Of internal linkage and always inlined, because it is compiled once per instruction set (loops.h).
#pragma once

#include <cstdint>

#include "kernels/scalar.h"

namespace engram::kernels {
namespace {

template <int kBytes>
struct Vectors {
  static constexpr int kFloats = kBytes / 4;
  static constexpr int kDoubles = kBytes / 8;

  typedef float Float __attribute__((vector_size(kBytes)));
  typedef uint32_t Word __attribute__((vector_size(kBytes)));
  typedef int32_t Int __attribute__((vector_size(kBytes)));
  typedef double Double __attribute__((vector_size(kBytes)));
  typedef uint16_t HalfWords __attribute__((vector_size(kBytes / 2)));  // kFloats of bf16

  typedef uint8_t Bytes __attribute__((vector_size(kBytes / 4)));  // kFloats of them

  // As many floats, words or bf16 as a Double has doubles.
  typedef float FewFloats __attribute__((vector_size(kBytes / 2)));
  typedef uint32_t FewWords __attribute__((vector_size(kBytes / 2)));
  typedef uint16_t FewHalfWords __attribute__((vector_size(kBytes / 4)));
};

// Loads that give f32 or f64 from the element type of a highway or a key, unaligned.
template <int kBytes, typename Element>
struct Elements;

template <int kBytes>
struct Elements<kBytes, float> {
  using V = Vectors<kBytes>;

  static ENGRAM_ALWAYS_INLINE void Load(const uint8_t* from, typename V::Float& to) {
    __builtin_memcpy(&to, from, sizeof(to));
  }
  static ENGRAM_ALWAYS_INLINE void Load(const uint8_t* from, typename V::Double& to) {
    typename V::FewFloats floats;
    __builtin_memcpy(&floats, from, sizeof(floats));
    to = __builtin_convertvector(floats, typename V::Double);
  }
  static ENGRAM_ALWAYS_INLINE void Store(const typename V::Float& from, uint8_t* to) {
    __builtin_memcpy(to, &from, sizeof(from));
  }
  static ENGRAM_ALWAYS_INLINE float LoadOne(const uint8_t* from) { return LoadUnaligned<float>(from); }
  static ENGRAM_ALWAYS_INLINE void StoreOne(float from, uint8_t* to) { StoreUnaligned(to, from); }
};

template <int kBytes>
struct Elements<kBytes, Bf16> {
  using V = Vectors<kBytes>;

  static ENGRAM_ALWAYS_INLINE void Load(const uint8_t* from, typename V::Float& to) {
    typename V::HalfWords halves;
    __builtin_memcpy(&halves, from, sizeof(halves));
    to = (typename V::Float)(__builtin_convertvector(halves, typename V::Word) << 16);
  }
  static ENGRAM_ALWAYS_INLINE void Load(const uint8_t* from, typename V::Double& to) {
    typename V::FewHalfWords halves;
    __builtin_memcpy(&halves, from, sizeof(halves));
    const auto floats = (typename V::FewFloats)(__builtin_convertvector(halves, typename V::FewWords) << 16);
    to = __builtin_convertvector(floats, typename V::Double);
  }
  // Bf16FromF32, lane by lane.
  static ENGRAM_ALWAYS_INLINE void Store(const typename V::Float& from, uint8_t* to) {
    const auto bits = (typename V::Word)from;
    const typename V::Word rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    const typename V::Word quieted = (bits >> 16) | 0x40u;
    const auto is_nan = (typename V::Word)((bits & 0x7FFFFFFFu) > 0x7F800000u);
    const typename V::Word words = (quieted & is_nan) | (rounded & ~is_nan);
    const auto halves = __builtin_convertvector(words, typename V::HalfWords);
    __builtin_memcpy(to, &halves, sizeof(halves));
  }
  static ENGRAM_ALWAYS_INLINE float LoadOne(const uint8_t* from) { return F32FromBf16(LoadUnaligned<Bf16>(from)); }
  static ENGRAM_ALWAYS_INLINE void StoreOne(float from, uint8_t* to) { StoreUnaligned(to, Bf16FromF32(from)); }
};

}  // namespace
}  // namespace engram::kernels
