// Sixteen float lanes by the compiler's own vectors, with the few instructions that vectors cannot express.
//
// Knows: how a 64-byte word of packed weights meets one broadcast word of activations. Every function has a plain
// vector form that any GCC or Clang target compiles (Arm NEON, AVX2, AVX-512 without extensions); the `#if` branches
// name the instruction that replaces it. Does not know: experts, layouts, threads.
//
// Results of the two forms of dot_bf16 and Fp8 agree up to float32 rounding; the integer ones agree exactly.
#pragma once

#include <cstdint>
#include <cstring>

#if !defined(HOTSET_GENERIC) && (defined(__AVX512F__) || defined(__F16C__))
#include <immintrin.h>
#endif
#if !defined(HOTSET_GENERIC) && defined(__ARM_FEATURE_MATMUL_INT8)
#include <arm_neon.h>
#endif
#if !defined(HOTSET_GENERIC) && defined(__AVX512F__)
#define HOTSET_AVX512 1
#endif
#if defined(HOTSET_AVX512) && defined(__AVX512BF16__)
#define HOTSET_BF16 1
#endif
#if defined(HOTSET_AVX512) && defined(__AVX512VNNI__)
#define HOTSET_VNNI 1
#endif
#if defined(HOTSET_AVX512) && defined(__AVX512VBMI__) && defined(__AVX512BW__)
#define HOTSET_VBMI 1
#endif

#define INLINE static inline __attribute__((always_inline))

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef uint8_t u8x16 __attribute__((vector_size(16)));
typedef uint8_t u8x64 __attribute__((vector_size(64)));

template <class V>
INLINE V load(const void* from) {
    V value;
    std::memcpy(&value, from, sizeof value);
    return value;
}
template <class V>
INLINE void store(void* to, V value) {
    std::memcpy(to, &value, sizeof value);
}

INLINE f32x16 splat(float x) { return f32x16{} + x; }
INLINE u32x16 splat_u32(uint32_t x) { return u32x16{} + x; }
INLINE float as_float(uint32_t bits) { return load<float>(&bits); }
INLINE uint32_t as_bits(float x) { return load<uint32_t>(&x); }
// comparisons of vectors give 0 or -1 per lane; NaN compares false, so `b` must be the side that keeps it
INLINE f32x16 select(i32x16 mask, f32x16 a, f32x16 b) { return (f32x16)(((i32x16)a & mask) | ((i32x16)b & ~mask)); }

INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
#if defined(HOTSET_AVX512)
    return (f32x16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
    return a * b + c;  // contracted to one rounding where the target has it (-ffp-contract=fast)
#endif
}

INLINE u32x16 widen(u8x16 x) {
#if defined(HOTSET_AVX512)
    return (u32x16)_mm512_cvtepu8_epi32((__m128i)x);
#else  // in two steps: GCC takes a conversion to four times the width apart into single lanes
    return __builtin_convertvector(__builtin_convertvector(x, u16x16), u32x16);
#endif
}

// round to nearest even, for |x| < 2^22
INLINE i32x16 round_to_int(f32x16 x) {
    return (i32x16)(x + 12582912.0f) - (int32_t)0x4b400000;  // 1.5 * 2^23
}

// rows[c] lane r becomes rows[r] lane c. Interleaving rows i and i + 8 turns the eight bits of an element's place by one,
// and four turns swap row and lane.
INLINE void transpose(u32x16 (&rows)[16]) {
#if defined(HOTSET_AVX512)
    const u32x16 low = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23}, high = low + 8;
    for (int turn = 0; turn < 4; turn++) {
        u32x16 next[16];
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) {
            next[2 * i] = (u32x16)_mm512_permutex2var_epi32((__m512i)rows[i], (__m512i)low, (__m512i)rows[i + 8]);
            next[2 * i + 1] = (u32x16)_mm512_permutex2var_epi32((__m512i)rows[i], (__m512i)high, (__m512i)rows[i + 8]);
        }
        std::memcpy(rows, next, sizeof next);
    }
#else
    typedef uint32_t u32x4 __attribute__((vector_size(16)));
#if defined(__clang__)
#define HOTSET_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define HOTSET_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, u32x4{__VA_ARGS__})
#endif
    u32x4 from[16][4], to[16][4];
    std::memcpy(from, rows, sizeof from);
    for (int r = 0; r < 4; r++)  // the same in squares of 4 x 4 with two turns: vectors that every target has
        for (int c = 0; c < 4; c++) {
            const u32x4 a = from[4 * r][c], b = from[4 * r + 1][c], x = from[4 * r + 2][c], y = from[4 * r + 3][c];
            const u32x4 ax = HOTSET_SHUFFLE(a, x, 0, 4, 1, 5), ax_high = HOTSET_SHUFFLE(a, x, 2, 6, 3, 7);
            const u32x4 by = HOTSET_SHUFFLE(b, y, 0, 4, 1, 5), by_high = HOTSET_SHUFFLE(b, y, 2, 6, 3, 7);
            to[4 * c][r] = HOTSET_SHUFFLE(ax, by, 0, 4, 1, 5);
            to[4 * c + 1][r] = HOTSET_SHUFFLE(ax, by, 2, 6, 3, 7);
            to[4 * c + 2][r] = HOTSET_SHUFFLE(ax_high, by_high, 0, 4, 1, 5);
            to[4 * c + 3][r] = HOTSET_SHUFFLE(ax_high, by_high, 2, 6, 3, 7);
        }
#undef HOTSET_SHUFFLE
    std::memcpy(rows, to, sizeof to);
#endif
}

// ---- half precision ------------------------------------------------------------------------------------------

INLINE f32x16 from_bf16(u16x16 h) { return (f32x16)(__builtin_convertvector(h, u32x16) << 16); }

INLINE f32x16 from_f16(u16x16 h) {
#if defined(HOTSET_AVX512)
    return (f32x16)_mm512_cvtph_ps((__m256i)h);
#else
    u32x16 bits = __builtin_convertvector(h, u32x16);
    u32x16 magnitude = bits & 0x7fff;
    f32x16 value = (f32x16)(magnitude << 13) * as_float(0x77800000u);  // 2^112: the exponent bias 127 - 15
    u32x16 special = (u32x16)(magnitude >= 0x7c00) & 0x7f800000u;      // infinity and NaN keep theirs
    return (f32x16)((u32x16)value | special | ((bits & 0x8000) << 16));
#endif
}

// round to nearest even; NaN stays NaN
INLINE u16x16 to_bf16(f32x16 x) {
    u32x16 bits = (u32x16)x;
    u32x16 rounded = bits + 0x7fff + ((bits >> 16) & 1);
    i32x16 nan = (i32x16)(x != x);
    return __builtin_convertvector(((rounded & ~(u32x16)nan) | (0x7fc00000u & (u32x16)nan)) >> 16, u16x16);
}

INLINE u16x16 to_f16(f32x16 x) {
#if defined(HOTSET_AVX512)
    return (u16x16)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    u32x16 bits = (u32x16)x, sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7fffffff;
    u32x16 normal = (magnitude + 0xfff + ((magnitude >> 13) & 1) - 0x38000000u) >> 13;
    // below 2^-14 the result is a multiple of 2^-24: adding 0.5 aligns it to the float's last bits
    u32x16 tiny = (u32x16)((f32x16)magnitude + 0.5f) - as_bits(0.5f);
    u32x16 is_tiny = (u32x16)(magnitude < 0x38800000u), is_big = (u32x16)(magnitude >= 0x477ff000u);
    u32x16 is_nan = (u32x16)(magnitude > 0x7f800000u);
    u32x16 half = (tiny & is_tiny) | (normal & ~is_tiny);
    half = (half & ~is_big) | ((0x7c00u + (is_nan & 0x200u)) & is_big);
    return __builtin_convertvector(half | sign, u16x16);
#endif
}

// ---- one word of weights times one broadcast word of activations, added to 16 rows ---------------------------

// lane r: w = two bfloat16 of row r (lower half first), a = two bfloat16
INLINE f32x16 dot_bf16(f32x16 sum, u32x16 w, uint32_t a) {
#if defined(HOTSET_BF16)
    return (f32x16)_mm512_dpbf16_ps((__m512)sum, (__m512bh)w, (__m512bh)_mm512_set1_epi32((int)a));
#else
    sum = fma((f32x16)(w << 16), splat(as_float(a << 16)), sum);
    return fma((f32x16)(w & 0xffff0000u), splat(as_float(a & 0xffff0000u)), sum);
#endif
}

// lane r: w = four unsigned bytes of row r, a = four signed bytes
INLINE i32x16 dot_u8s8(i32x16 sum, u32x16 w, uint32_t a) {
#if defined(HOTSET_VNNI)
    return (i32x16)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, _mm512_set1_epi32((int)a));
#elif defined(__AVX2__) && !defined(HOTSET_GENERIC)
    // even and odd bytes as 16-bit pairs: _mm256_maddubs_epi16 would saturate
    uint32_t even = (uint16_t)(int8_t)a | (uint32_t)(uint16_t)(int8_t)(a >> 16) << 16;
    uint32_t odd = (uint16_t)(int8_t)(a >> 8) | (uint32_t)(uint16_t)(int8_t)(a >> 24) << 16;
    __m256i halves[2], sums[2];
    std::memcpy(halves, &w, 64);
    std::memcpy(sums, &sum, 64);
    for (int i = 0; i < 2; i++) {
        __m256i low = _mm256_and_si256(halves[i], _mm256_set1_epi16(0xff)), high = _mm256_srli_epi16(halves[i], 8);
        sums[i] = _mm256_add_epi32(sums[i], _mm256_madd_epi16(low, _mm256_set1_epi32((int)even)));
        sums[i] = _mm256_add_epi32(sums[i], _mm256_madd_epi16(high, _mm256_set1_epi32((int)odd)));
    }
    std::memcpy(&sum, sums, 64);
    return sum;
#elif defined(__ARM_FEATURE_MATMUL_INT8) && !defined(HOTSET_GENERIC)
    int32x4_t sums[4];
    uint8x16_t parts[4];
    std::memcpy(sums, &sum, 64);
    std::memcpy(parts, &w, 64);
    for (int i = 0; i < 4; i++) sums[i] = vusdotq_s32(sums[i], parts[i], vreinterpretq_s8_u32(vdupq_n_u32(a)));
    std::memcpy(&sum, sums, 64);
    return sum;
#else
    sum += (i32x16)(w & 0xff) * (int32_t)(int8_t)a;
    sum += (i32x16)((w >> 8) & 0xff) * (int32_t)(int8_t)(a >> 8);
    sum += (i32x16)((w >> 16) & 0xff) * (int32_t)(int8_t)(a >> 16);
    return sum + (i32x16)(w >> 24) * (int32_t)(int8_t)(a >> 24);
#endif
}

// bytes 0..15 -> table entries
INLINE u32x16 lookup16(u8x16 table, u32x16 index) {
#if defined(HOTSET_AVX512) && defined(__AVX512BW__)
    return (u32x16)_mm512_shuffle_epi8(_mm512_broadcast_i32x4((__m128i)table), (__m512i)index);
#else
    u8x16 parts[4];
    std::memcpy(parts, &index, 64);
    for (auto& part : parts) {
#if defined(__clang__)
        for (int i = 0; i < 16; i++) part[i] = table[part[i] & 15];
#else
        part = __builtin_shuffle(table, part);
#endif
    }
    std::memcpy(&index, parts, 64);
    return index;
#endif
}

// Four E4M3 bytes per row, decoded exactly, against four bfloat16 activations. NaN codes are refused when weights are
// packed: only finite ones come here.
#if defined(HOTSET_VBMI)
struct Fp8Tables {  // the two bytes of the bfloat16 of each 7-bit magnitude
    alignas(64) uint8_t high[128], low[128];
    Fp8Tables() {
        for (int code = 0; code < 128; code++) {
            int exponent = code >> 3, mantissa = code & 7;
            float unit = as_float((uint32_t)((exponent ? exponent : 1) - 10 + 127) << 23);
            uint32_t bits = as_bits((float)(exponent ? 8 + mantissa : mantissa) * unit);
            high[code] = (uint8_t)(bits >> 24);
            low[code] = (uint8_t)(bits >> 16);
        }
    }
};
inline const Fp8Tables fp8_tables;

struct Fp8Words {
    u32x16 lower, upper;  // of each four rows, the first two and the last two, four bfloat16 a row
    INLINE Fp8Words of(u32x16 w) {
        const auto* high = (const __m512i*)fp8_tables.high;
        const auto* low = (const __m512i*)fp8_tables.low;
        __m512i code = (__m512i)w;
        __m512i top = _mm512_permutex2var_epi8(high[0], code, high[1]);
        __m512i bottom = _mm512_permutex2var_epi8(low[0], code, low[1]);
        top = _mm512_ternarylogic_epi64(top, code, _mm512_set1_epi8((char)0x80), 0xf8);  // top | (code & 0x80)
        return {(u32x16)_mm512_unpacklo_epi8(bottom, top), (u32x16)_mm512_unpackhi_epi8(bottom, top)};
    }
};
struct Fp8Sum {
    __m512 lower = _mm512_setzero_ps(), upper = _mm512_setzero_ps();  // two lanes a row
    __attribute__((always_inline)) Fp8Sum plus(const Fp8Words& w, const uint8_t* a) const {
        const __m512i four = _mm512_set1_epi64(load<int64_t>(a));
        return {dot_pairs(lower, (__m512i)w.lower, four), dot_pairs(upper, (__m512i)w.upper, four)};
    }
    __attribute__((always_inline)) f32x16 rows() const {
        return (f32x16)_mm512_add_ps(_mm512_shuffle_ps(lower, upper, 0x88), _mm512_shuffle_ps(lower, upper, 0xdd));
    }
    INLINE __m512 dot_pairs(__m512 sum, __m512i w, __m512i a) {
#if defined(HOTSET_BF16)
        return _mm512_dpbf16_ps(sum, (__m512bh)w, (__m512bh)a);
#else
        auto even = [](__m512i x) { return (__m512)_mm512_slli_epi32(x, 16); };
        auto odd = [](__m512i x) { return (__m512)_mm512_and_si512(x, _mm512_set1_epi32((int)0xffff0000)); };
        return _mm512_fmadd_ps(odd(w), odd(a), _mm512_fmadd_ps(even(w), even(a), sum));
#endif
    }
};
#else
struct Fp8Words {
    f32x16 value[4];
    INLINE Fp8Words of(u32x16 w) {
        Fp8Words out;
        for (int i = 0; i < 4; i++) {
            u32x16 code = (w >> (8 * i)) & 0xff;
            f32x16 magnitude = (f32x16)((code & 0x7f) << 20) * as_float(0x7b800000u);  // 2^120: bias 127 - 7
            out.value[i] = (f32x16)((u32x16)magnitude | ((code & 0x80) << 24));
        }
        return out;
    }
};
struct Fp8Sum {
    f32x16 even = {}, odd = {};
    __attribute__((always_inline)) Fp8Sum plus(const Fp8Words& w, const uint8_t* a) const {
        const uint32_t first = load<uint32_t>(a), second = load<uint32_t>(a + 4);
        Fp8Sum sum;
        sum.even = fma(w.value[0], splat(as_float(first << 16)), even);
        sum.odd = fma(w.value[1], splat(as_float(first & 0xffff0000u)), odd);
        sum.even = fma(w.value[2], splat(as_float(second << 16)), sum.even);
        sum.odd = fma(w.value[3], splat(as_float(second & 0xffff0000u)), sum.odd);
        return sum;
    }
    __attribute__((always_inline)) f32x16 rows() const { return even + odd; }
};
#endif

// ---- exp and its relatives -----------------------------------------------------------------------------------

// e^x to about 2 units in the last place: 2^n times a degree-6 polynomial on [-ln2/2, ln2/2] (Cephes' expf
// coefficients)
INLINE f32x16 exp(f32x16 x) {
    f32x16 high = splat(88.0f), low = splat(-87.0f);
    x = select(x > high, high, x);
    x = select(x < low, low, x);
    f32x16 n = (x * 1.44269504088896341f + 12582912.0f) - 12582912.0f;  // round to nearest: 1.5 * 2^23
    f32x16 r = fma(n, splat(-0.693359375f), x);
    r = fma(n, splat(2.12194440e-4f), r);
    f32x16 p = splat(1.9875691500e-4f);
    p = fma(p, r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    p = fma(p * r, r, r + 1.0f);
    i32x16 exponent = __builtin_convertvector(select((i32x16)(x == x), n, splat(0.0f)), i32x16);
    return p * (f32x16)((u32x16)(exponent + 127) << 23);
}

INLINE f32x16 sigmoid(f32x16 x) { return 1.0f / (1.0f + exp(-x)); }
