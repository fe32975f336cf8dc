// Routed experts of one layer on the host: [T, H] tokens and their picks in, [T, H] (or each pick's own row) out.
//
// Packed layout of a matrix [N, K]: rows in panels of 64 = 4 blocks of 16; a block is a run of 64-byte words, word i
// holding bytes 4i..4i+3 of its 16 rows. Four streams hold a matrix: stream r is block r of panel 0, of panel 1, and so
// on, so that a thread that computes panels one after the other reads four long streams, which is what memory likes.
// Every word is used for all tokens of the expert at hand, and nothing is ever summed across lanes: lane r is row r.
// Panels of a gated first matrix hold 32 gate rows and the 32 up rows that meet them, so a panel ends with 32 finished
// activations.
//
// What a token's result is does not depend on threads, on other tokens, or on which experts are present: each output
// row of each pick is one chain of operations in one order, and picks are combined in the order of the router.
//
// Does not know: where weights come from, how scales were checked, Python.

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "pool.h"
#include "simd.h"

namespace {

constexpr int kLanes = 16, kBlocks = 4, kPanel = kLanes * kBlocks;
constexpr int kStep = 32;      // k's per step: the group of quantised activations; K is padded to it
// k's of a panel used for all token tiles before going on: 256 KiB of bfloat16, for the L2 cache
constexpr int kChunkK = 2048;
// Bytes ahead in each stream, fetched into the second-level cache (hint 2): on Zen 4 the best of 192 to 4096 bytes and of
// both caches; straight into the first-level cache costs int8 a fifth.
constexpr int kPrefetch = 1024;
constexpr int kPrefetchHint = 2;

enum Format : int32_t { kF32, kF16, kBF16, kI8, kI4, kMXFP4, kF8, kFormats };
enum Number : int32_t { kNoNumber, kFloat32, kFloat16, kBFloat16, kE8M0 };
enum Activation : int32_t { kSilu, kGelu, kGeluTanh, kRelu, kRelu2 };

int size_of(int32_t number) { return number == kFloat32 ? 4 : number == kE8M0 ? 1 : number == kNoNumber ? 0 : 2; }

INLINE f32x16 load_numbers(const uint8_t* from, int32_t number) {
    switch (number) {
        case kFloat32: return load<f32x16>(from);
        case kFloat16: return from_f16(load<u16x16>(from));
        case kBFloat16: return from_bf16(load<u16x16>(from));
        case kE8M0: {
            u32x16 e = widen(load<u8x16>(from));
            return (f32x16)((e << 23) | (0x00400000u & (u32x16)(e == 0)));  // 2^(e - 127), 2^-127 being subnormal
        }
        default: return splat(1.0f);
    }
}

INLINE void store_numbers(uint8_t* to, int32_t number, f32x16 x) {
    if (number == kFloat32) store(to, x);
    else if (number == kFloat16) store(to, to_f16(x));
    else store(to, to_bf16(x));
}

float load_number(const uint8_t* from, int32_t number) {
    if (number == kFloat32) return load<float>(from);
    u16x16 bits = {load<uint16_t>(from)};
    return number == kFloat16 ? from_f16(bits)[0] : from_bf16(bits)[0];
}

struct StepScale {
    float scale;
    int32_t start;  // cancels the offset of unsigned weights: -offset times the sum of the step's activations
};

// What `start` becomes where each row has an offset of its own. A real one is at most 32 * 127; the cast keeps what the
// padding tokens of a tile happen to hold from overflowing.
INLINE i32x16 times_zeros(int32_t start, const uint8_t* zeros) {
    return (i32x16)widen(load<u8x16>(zeros)) * (int32_t)(int16_t)start;
}

#define PRAGMA(x) _Pragma(#x)
#if defined(HOTSET_AVX512)
#define UNROLL_WORDS PRAGMA(GCC unroll 8)
#else  // 64-byte vectors are several registers here, and unrolling them takes the compiler minutes
#define UNROLL_WORDS PRAGMA(GCC unroll 1)
#endif
#define EACH(t) PRAGMA(GCC unroll 16) for (int t = 0; t < NT; t++)
#define EACH_BLOCK(r) PRAGMA(GCC unroll 4) for (int r = 0; r < kBlocks; r++)

// ---- formats -------------------------------------------------------------------------------------------------
// kKs: k's in a 4-byte word. kBytes: bytes of activations that meet one word.

struct F32 {
    static constexpr int kKs = 1, kBytes = 4;
    static constexpr bool kInteger = false, kScaled = false;
    using Wide = f32x16;
    INLINE Wide widen(u32x16 w) { return (f32x16)w; }
    INLINE f32x16 dot(f32x16 sum, const Wide& w, const uint8_t* a) { return fma(w, splat(load<float>(a)), sum); }
};
struct F16 {
    static constexpr int kKs = 2, kBytes = 8;
    static constexpr bool kInteger = false, kScaled = false;
    struct Wide {
        f32x16 even, odd;
    };
    INLINE Wide widen(u32x16 w) {
        return {from_f16(__builtin_convertvector(w & 0xffff, u16x16)),
                from_f16(__builtin_convertvector(w >> 16, u16x16))};
    }
    INLINE f32x16 dot(f32x16 sum, const Wide& w, const uint8_t* a) {
        return fma(w.odd, splat(load<float>(a + 4)), fma(w.even, splat(load<float>(a)), sum));
    }
};
struct BF16 {
    static constexpr int kKs = 2, kBytes = 4;
    static constexpr bool kInteger = false, kScaled = false;
    using Wide = u32x16;
    INLINE Wide widen(u32x16 w) { return w; }
    INLINE f32x16 dot(f32x16 sum, const Wide& w, const uint8_t* a) { return dot_bf16(sum, w, load<uint32_t>(a)); }
};
struct F8 {
    static constexpr int kKs = 4, kBytes = 8;
    static constexpr bool kInteger = false, kScaled = true, kZeros = false;
    using Sum = Fp8Sum;  // two chains: one would wait for its own sixteen products
    using Wide = Fp8Words;
    INLINE Wide widen(u32x16 w) { return Fp8Words::of(w); }
    INLINE Sum dot(Sum sum, const Wide& w, const uint8_t* a) { return sum.plus(w, a); }
};
struct I8 {  // stored with the sign bit flipped: byte = weight + 128
    static constexpr int kKs = 4, kBytes = 4, kOffset = 128;
    static constexpr float kUnit = 1.0f;
    static constexpr bool kInteger = true, kScaled = true, kZeros = false;
    using Sum = i32x16;
    using Wide = u32x16;
    INLINE Wide widen(u32x16 w) { return w; }
    INLINE i32x16 dot(i32x16 sum, const Wide& w, const uint8_t* a) { return dot_u8s8(sum, w, load<uint32_t>(a)); }
};
struct Nibbles {
    u32x16 even, odd;  // k's 0 2 4 6 and 1 3 5 7 of a word: the low and the high nibbles of its bytes
};
struct I4 {  // nibble = weight + 8
    static constexpr int kKs = 8, kBytes = 8, kOffset = 8;
    static constexpr float kUnit = 1.0f;
    static constexpr bool kInteger = true, kScaled = true, kZeros = false;
    using Sum = i32x16;
    using Wide = Nibbles;
    INLINE Wide widen(u32x16 w) { return {w & 0x0f0f0f0fu, (w >> 4) & 0x0f0f0f0fu}; }
    INLINE i32x16 dot(i32x16 sum, const Wide& w, const uint8_t* a) {
        return dot_u8s8(dot_u8s8(sum, w.even, load<uint32_t>(a)), w.odd, load<uint32_t>(a + 4));
    }
};
struct I4Z : I4 {  // nibble = weight + the zero of its row and group, by which -sum(a) is multiplied
    static constexpr int kOffset = 1;
    static constexpr bool kZeros = true;
};
struct MXFP4 {  // E2M1 code -> twice its value plus 12
    static constexpr int kKs = 8, kBytes = 8, kOffset = 12;
    static constexpr float kUnit = 0.5f;
    static constexpr bool kInteger = true, kScaled = true, kZeros = false;
    using Sum = i32x16;
    using Wide = Nibbles;
    INLINE Wide widen(u32x16 w) {
        const u8x16 table = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
        return {lookup16(table, w & 0x0f0f0f0fu), lookup16(table, (w >> 4) & 0x0f0f0f0fu)};
    }
    INLINE i32x16 dot(i32x16 sum, const Wide& w, const uint8_t* a) { return I4::dot(sum, w, a); }
};

// Activations as a kernel wants them: tiles of `size` tokens, in blocks of one step (32 k's): every token's values for
// the step, then, for integer formats, every token's StepScale. One pointer and constant distances reach all of a
// block.
template <class F>
constexpr int64_t kStepBytes = kStep / F::kKs * F::kBytes;
template <class F>
constexpr int64_t kTokenBytes = kStepBytes<F> + (F::kInteger ? sizeof(StepScale) : 0);  // of one token in one block

template <class F>
INLINE StepScale* step_scale(const uint8_t* block, int64_t size, int64_t t) {
    return (StepScale*)(block + size * kStepBytes<F>) + t;
}

// Writes 32 values as token t of a block.
template <class F>
void prepare_step(uint8_t* block, int64_t size, int64_t t, const float* x) {
    uint8_t* to = block + t * kStepBytes<F>;
    if constexpr (F::kInteger) {
        f32x16 a = load<f32x16>(x), b = load<f32x16>(x + 16);
        f32x16 most = select((i32x16)(a < 0), -a, a), other = select((i32x16)(b < 0), -b, b);
        most = select((i32x16)(most < other), other, most);
        const f32x16 zero = (a - a) + (b - b);  // NaN where a or b is infinite or NaN
        float peak = 0, odd = 0;
        for (int i = 0; i < 16; i++) {
            peak = most[i] > peak ? most[i] : peak;
            odd += zero[i];
        }
        StepScale& scale = *step_scale<F>(block, size, t);
        if (odd != 0) {  // everything that meets this step becomes NaN
            std::memset(to, 0, kStep);
            scale = {as_float(0x7fc00000u), 0};
            return;
        }
        const float inverse = peak > 1.0e-35f ? 127.0f / peak : 0.0f;
        const i32x16 qa = round_to_int(a * inverse), qb = round_to_int(b * inverse);
        int32_t sum = 0;
        const i32x16 both = qa + qb;
        for (int i = 0; i < 16; i++) sum += both[i];
        if constexpr (F::kKs == 8) {  // even k's of a word, then odd ones
            typedef int8_t i8x16 __attribute__((vector_size(16)));
            const i8x16 ba = __builtin_convertvector(qa, i8x16), bb = __builtin_convertvector(qb, i8x16);
            for (int i = 0; i < 16; i++) {
                const int j = (i & 8) + (i & 1) * 4 + ((i & 7) >> 1);
                to[j] = (uint8_t)ba[i];
                to[16 + j] = (uint8_t)bb[i];
            }
        } else {
            store(to, __builtin_convertvector((u32x16)qa, u8x16));
            store(to + 16, __builtin_convertvector((u32x16)qb, u8x16));
        }
        scale = {peak / 127.0f * F::kUnit, -F::kOffset * sum};
    } else if constexpr (F::kBytes / F::kKs == 2) {
        for (int half = 0; half < 2; half++) {
            store(to + 32 * half, to_bf16(load<f32x16>(x + 16 * half)));
        }
    } else {
        std::memcpy(to, x, kStep * sizeof(float));
    }
}

struct Matrix {
    const uint8_t* data;
    const uint8_t* scales;  // [panel][group][64], or one group per panel where scales are per row
    const uint8_t* zeros;   // in the order of the scales, a byte each, or null
    const float* bias;      // [panel][64], or null
    int64_t kp;             // padded K
    int64_t block_bytes, stream_bytes, panel_scale_bytes, panel_zero_bytes;
    int32_t scale_number;
    int32_t group_steps;  // steps that share a scale
};

// out[t][64] += panel times token t of a tile, over steps [first, last): `out` carries the sums of the steps before.
// Sums of formats without scales stay in registers for all steps, 4 blocks x NT. With scales, a block's 32 k's are
// summed in registers and then scaled into `out`, so that every decoded word serves more tokens.
template <class F, int NT>
void panel_times(const Matrix& m, int64_t panel, int64_t first, int64_t last, const uint8_t* tile, float* out) {
    constexpr int kWords = kStep / F::kKs;
    const int64_t stride = m.stream_bytes;
    const uint8_t* data = m.data + panel * m.block_bytes + first * kWords * 64;
    const uint8_t* a = tile + first * NT * kTokenBytes<F>;

    if constexpr (!F::kScaled) {
        f32x16 total[kBlocks][NT];
        EACH(t) EACH_BLOCK(r) total[r][t] = load<f32x16>(out + t * kPanel + r * kLanes);
        for (int64_t step = first; step < last; step++) {
            UNROLL_WORDS for (int word = 0; word < kWords; word++) {
                typename F::Wide w[kBlocks];
                EACH_BLOCK(r) {
                    const uint8_t* from = data + r * stride + word * 64;
                    __builtin_prefetch(from + kPrefetch, 0, kPrefetchHint);
                    w[r] = F::widen(load<u32x16>(from));
                }
                EACH(t) EACH_BLOCK(r) total[r][t] = F::dot(total[r][t], w[r], a + t * kStepBytes<F> + word * F::kBytes);
            }
            data += kWords * 64;
            a += NT * kTokenBytes<F>;
        }
        EACH(t) EACH_BLOCK(r) store(out + t * kPanel + r * kLanes, total[r][t]);
    } else {
        const int number = m.scale_number, scale_block = kLanes * size_of(number);
        const uint8_t* scales = m.scales + panel * m.panel_scale_bytes + first / m.group_steps * kBlocks * scale_block;
        const uint8_t* zeros = nullptr;
        if constexpr (F::kZeros) zeros = m.zeros + panel * m.panel_zero_bytes + first / m.group_steps * kPanel;
        int64_t left = m.group_steps - first % m.group_steps;
        for (int64_t step = first; step < last; step++) {
            __builtin_prefetch(scales + 512);
#pragma GCC unroll 1
            for (int r = 0; r < kBlocks; r++) {
                const uint8_t* from = data + r * stride;
                f32x16 scale = load_numbers(scales + r * scale_block, number);
                typename F::Sum sum[NT];
                if constexpr (F::kZeros) {
                    EACH(t) sum[t] = times_zeros(step_scale<F>(a, NT, t)->start, zeros + r * kLanes);
                } else if constexpr (F::kInteger) {
                    EACH(t) sum[t] = i32x16{} + step_scale<F>(a, NT, t)->start;
                } else {
                    EACH(t) sum[t] = typename F::Sum{};
                }
                UNROLL_WORDS for (int word = 0; word < kWords; word++) {
                    __builtin_prefetch(from + word * 64 + kPrefetch, 0, kPrefetchHint);
                    typename F::Wide w = F::widen(load<u32x16>(from + word * 64));
                    EACH(t) sum[t] = F::dot(sum[t], w, a + t * kStepBytes<F> + word * F::kBytes);
                }
                EACH(t) {
                    float* to = out + t * kPanel + r * kLanes;
                    f32x16 part;
                    if constexpr (F::kInteger) {
                        part = __builtin_convertvector(sum[t], f32x16) * step_scale<F>(a, NT, t)->scale;
                    } else {
                        part = sum[t].rows();
                    }
                    store(to, fma(part, scale, load<f32x16>(to)));
                }
            }
            data += kWords * 64;
            a += NT * kTokenBytes<F>;
            if (--left == 0) {
                left = m.group_steps;
                scales += kBlocks * scale_block;
                if constexpr (F::kZeros) zeros += kPanel;
            }
        }
    }
}

// Tokens of a tile: as many as the registers hold sums for. Sizes that are compiled, and the one that `count` tokens
// are cut into: 7 is 4 + 3, 5 is 6 with one computed in vain.
#if defined(HOTSET_AVX512)
template <class F>
constexpr int64_t kLargestTile = F::kScaled ? 8 : 6;
#else
template <class F>
constexpr int64_t kLargestTile = 4;
#endif
int64_t compiled_size(int64_t n) { return n <= 4 ? n : n <= 6 ? 6 : 8; }

struct Tile {
    int64_t begin, size, count;  // rows [begin, begin + size) of the padded order, the first `count` of them wanted
    const uint8_t* tokens;       // for the first matrix
};

template <class F>
void tile_times(const Tile& tile, const Matrix& m, int64_t panel, int64_t first, int64_t last, const uint8_t* a,
                float* out) {
    switch (tile.size) {
        case 1: return panel_times<F, 1>(m, panel, first, last, a, out);
        case 2: return panel_times<F, 2>(m, panel, first, last, a, out);
        case 3: return panel_times<F, 3>(m, panel, first, last, a, out);
        case 4: return panel_times<F, 4>(m, panel, first, last, a, out);
    }
    if constexpr (kLargestTile<F> >= 6) {
        if (tile.size == 6) return panel_times<F, 6>(m, panel, first, last, a, out);
    }
    if constexpr (kLargestTile<F> >= 8) panel_times<F, 8>(m, panel, first, last, a, out);
}

// out[i][64] = panel times row i, plus bias, for all rows of `count` tiles; inner: base of the tiles' activations, or
// null for tokens.
template <class F>
void panel_times_tiles(const Matrix& m, int64_t panel, const Tile* tiles, int64_t count, const uint8_t* inner,
                       float* out) {
    const int64_t begin = tiles[0].begin, rows = tiles[count - 1].begin + tiles[count - 1].size - begin;
    std::memset(out, 0, rows * kPanel * sizeof(float));
    const int64_t steps = m.kp / kStep, chunk = count > 1 ? kChunkK / kStep : steps;
    for (int64_t first = 0; first < steps; first += chunk) {
        const int64_t last = first + chunk < steps ? first + chunk : steps;
        for (const Tile* t = tiles; t < tiles + count; t++)
            tile_times<F>(*t, m, panel, first, last, inner ? inner + t->begin * steps * kTokenBytes<F> : t->tokens,
                          out + (t->begin - begin) * kPanel);
    }
    if (m.bias)
        for (int b = 0; b < kBlocks; b++) {
            f32x16 bias = load<f32x16>(m.bias + panel * kPanel + b * kLanes);
            for (int64_t i = 0; i < rows; i++) {
                float* o = out + i * kPanel + b * kLanes;
                store(o, load<f32x16>(o) + bias);
            }
        }
}

INLINE f32x16 activate(f32x16 x, int32_t kind, float alpha) {
    switch (kind) {
        case kSilu: return x * sigmoid(x * alpha);
        case kGeluTanh: {
            f32x16 inner = (x + x * x * x * 0.044715f) * 0.79788456080286536f;
            return x * sigmoid(inner * 2.0f);  // (1 + tanh(z)) / 2 = sigmoid(2 z)
        }
        case kGelu:
            for (int i = 0; i < 16; i++) x[i] = 0.5f * x[i] * std::erfc(x[i] * -0.70710678118654752f);
            return x;
        default: {
            f32x16 positive = select((i32x16)(x < 0), f32x16{}, x);
            return kind == kRelu ? positive : positive * positive;
        }
    }
}

}  // namespace

// ---- C interface ---------------------------------------------------------------------------------------------

extern "C" {

// One layer. Offsets are from the start of an expert's packed buffer; those of scales, zeros and biases are negative
// where there are none.
struct HotsetLayer {
    int64_t num_experts, hidden, intermediate;
    int32_t format, scale_number, gated, activation;
    float alpha, limit, up_offset;
    int32_t reserved;
    int64_t first_group_steps, second_group_steps;  // steps of 32 k's that share a scale
    int64_t first_scales, first_zeros, first_bias, second_data, second_scales, second_zeros, second_bias;
};

// One call. ids: [T, K] (bytes each: id_bytes); an id of -1 or num_experts is no pick. experts: [E] packed buffers,
// null = absent.
struct HotsetCall {
    const uint8_t* const* experts;
    const uint8_t* tokens;      // [T, H], tokens_number
    const uint8_t* ids;         // [T, K]
    const uint8_t* weights;     // [T, K], weights_number
    uint8_t* out;               // [T, H], out_number: sum over k of weight times pick; or null
    float* picks;               // [T, K, H]: every pick's own row, unweighted, zero for no pick; or null
    Pool::OpenMp openmp;        // whose threads compute; null: the pool's own
    int64_t num_tokens, top_k;
    int32_t id_bytes, tokens_number, weights_number, out_number, threads;
    int32_t bad_id;             // set where the call is refused
    int32_t accumulate;         // out, float32, holds the sum of earlier picks and is added to
};

enum HotsetStatus : int32_t { kOk = 0, kAbsent = 1, kBadId = 2, kNoMemory = 3 };
}

namespace {

struct Scratch {
    uint8_t* data = nullptr;
    size_t size = 0;
    // Contents are lost. False: no memory.
    bool reserve(size_t bytes) {
        if (bytes <= size) return true;
        std::free(data);
        bytes = (bytes + bytes / 4 + 4095) / 4096 * 4096;
        data = (uint8_t*)std::aligned_alloc(4096, bytes);
        size = data ? bytes : 0;
        return data != nullptr;
    }
};

constexpr int64_t kMaxTokens = 1024;  // of one pass: bounds the scratch; longer calls make several passes

struct Group {
    int64_t expert, first_tile, num_tiles;
};

struct Job {
    const HotsetLayer* layer;
    const HotsetCall* call;
    int64_t first_token, num_tokens, num_groups, h_panels, out_panels, hp, fp;
    const Group* groups;  // by expert
    const Tile* tiles;    // by group
    const int32_t* gathered;  // tiles of more than one token
    const int32_t* order;  // padded order -> pick t * K + k within this pass
    const int32_t* place;  // its inverse, -1 = no pick
    uint8_t* token_rows;   // [T] tiles of one
    uint8_t* token_tiles;
    uint8_t* inner_tiles;
    uint8_t* slots;  // per thread: sums [panels of a task][padded rows][64]
    int64_t token_row_bytes, slot_bytes, padded;
    int64_t h_run, out_run;  // panels of a task, one after the other
    int64_t h_tasks, out_tasks;  // h_tasks: of one expert
};

int64_t read_id(const HotsetCall& c, int64_t i) {
    if (c.id_bytes == 8) return load<int64_t>(c.ids + 8 * i);
    if (c.id_bytes == 4) return load<int32_t>(c.ids + 4 * i);
    return load<int16_t>(c.ids + 2 * i);
}

int64_t words_of(int32_t format) {
    static const int ks[kFormats] = {F32::kKs, F16::kKs, BF16::kKs, I8::kKs, I4::kKs, MXFP4::kKs, F8::kKs};
    return ks[format];
}

Matrix matrix(const HotsetLayer& l, const uint8_t* expert, bool second, int64_t kp, int64_t panels) {
    int64_t scales = second ? l.second_scales : l.first_scales, bias = second ? l.second_bias : l.first_bias;
    int64_t zeros = second ? l.second_zeros : l.first_zeros;
    int64_t group = second ? l.second_group_steps : l.first_group_steps;
    Matrix m;
    m.data = expert + (second ? l.second_data : 0);
    m.scales = scales < 0 ? nullptr : expert + scales;
    m.zeros = zeros < 0 ? nullptr : expert + zeros;
    m.bias = bias < 0 ? nullptr : (const float*)(expert + bias);
    m.kp = kp;
    m.block_bytes = kp / words_of(l.format) * 64;
    m.stream_bytes = panels * m.block_bytes;
    m.panel_zero_bytes = zeros < 0 ? 0 : (kp / kStep + group - 1) / group * kPanel;
    m.panel_scale_bytes = ((kp / kStep + group - 1) / group) * kPanel * size_of(l.scale_number);
    m.scale_number = l.scale_number;
    m.group_steps = (int32_t)group;
    return m;
}

// Sums of one panel of the first matrix become activations of the second.
template <class F>
void finish_inner(const Job& j, int64_t panel, const Tile* tiles, int64_t num_tiles, float* sums) {
    const HotsetLayer& l = *j.layer;
    const int made = l.gated ? kPanel / 2 : kPanel;
    for (const Tile* tile = tiles; tile < tiles + num_tiles; tile++)
        for (int64_t t = 0; t < tile->count; t++) {
            float* s = sums + (tile->begin - tiles->begin + t) * kPanel;
            for (int b = 0; b < made; b += kLanes) {
                f32x16 x = load<f32x16>(s + b);
                if (l.gated) {
                    f32x16 up = load<f32x16>(s + kPanel / 2 + b), limit = splat(l.limit);
                    x = select((i32x16)(x > limit), limit, x);
                    up = select((i32x16)(up > limit), limit, up);
                    up = select((i32x16)(up < -limit), -limit, up);
                    x = activate(x, l.activation, l.alpha) * (up + l.up_offset);
                } else {
                    x = activate(x, l.activation, l.alpha);
                }
                const int64_t row = panel * made + b;
                // rows past F meet weights of zero, but infinity times zero would not be zero
                if (row + kLanes > l.intermediate)
                    for (int q = 0; q < kLanes; q++)
                        if (row + q >= l.intermediate) x[q] = 0.0f;
                store(s + b, x);
            }
            uint8_t* inner = j.inner_tiles + tile->begin * (j.fp / kStep) * kTokenBytes<F>;
            for (int b = 0; b < made; b += kStep) {
                const int64_t step = (panel * made + b) / kStep;
                if (step < j.fp / kStep)
                    prepare_step<F>(inner + step * tile->size * kTokenBytes<F>, tile->size, t, s + b);
            }
        }
}

// One panel of the output: the picks of each token in the router's order.
void combine(const Job& j, int64_t panel, const float* sums) {
    const HotsetCall& c = *j.call;
    const int64_t K = c.top_k, H = j.layer->hidden, width = std::min<int64_t>(H - panel * kPanel, kPanel);
    for (int64_t t = 0; t < j.num_tokens; t++) {
        alignas(64) float total[kPanel] = {};
        if (c.accumulate) std::memcpy(total, (const float*)c.out + (j.first_token + t) * H + panel * kPanel, width * 4);
        for (int64_t k = 0; k < K; k++) {
            const int64_t pick = t * K + k, global = (j.first_token + t) * K + k;
            const float* s = j.place[pick] < 0 ? nullptr : sums + j.place[pick] * kPanel;
            if (c.picks) {
                float* to = c.picks + global * H + panel * kPanel;
                if (s) std::memcpy(to, s, width * sizeof(float));
                else std::memset(to, 0, width * sizeof(float));
            }
            if (!c.out || !s) continue;
            f32x16 weight = splat(load_number(c.weights + global * size_of(c.weights_number), c.weights_number));
            for (int b = 0; b < kPanel; b += kLanes)
                store(total + b, fma(weight, load<f32x16>(s + b), load<f32x16>(total + b)));
        }
        if (!c.out) continue;
        const int bytes = size_of(c.out_number);
        uint8_t* to = c.out + ((j.first_token + t) * H + panel * kPanel) * bytes;
        if (width == kPanel) {
            for (int b = 0; b < kPanel; b += kLanes)
                store_numbers(to + b * bytes, c.out_number, load<f32x16>(total + b));
        } else {
            uint8_t full[kPanel * 4];
            for (int b = 0; b < kPanel; b += kLanes)
                store_numbers(full + b * bytes, c.out_number, load<f32x16>(total + b));
            std::memcpy(to, full, width * bytes);
        }
    }
}

template <class F>
void run_task(void* opaque, int phase, int64_t task, int slot) {
    const Job& j = *(const Job*)opaque;
    const HotsetLayer& l = *j.layer;
    const HotsetCall& c = *j.call;
    const int64_t K = c.top_k, H = l.hidden;
    if (phase == 0) {  // one token into the form that the kernel wants
        const int64_t number_bytes = size_of(c.tokens_number);
        const uint8_t* token = c.tokens + (j.first_token + task) * H * number_bytes;
        uint8_t* row = j.token_rows + task * j.token_row_bytes;
        for (int64_t step = 0; step < j.hp / kStep; step++) {
            alignas(64) float x[kStep];
            for (int i = 0; i < kStep; i += 16) {
                int64_t k = step * kStep + i;
                if (k + 16 <= H) store(x + i, load_numbers(token + k * number_bytes, c.tokens_number));
                else
                    for (int q = 0; q < 16; q++)
                        x[i + q] = k + q < H ? load_number(token + (k + q) * number_bytes, c.tokens_number) : 0.0f;
            }
            prepare_step<F>(row + step * kTokenBytes<F>, 1, 0, x);
        }
        return;
    }
    if (phase == 1) {  // one tile of several tokens
        const Tile& tile = j.tiles[j.gathered[task]];
        const int64_t values = kStepBytes<F>, block = tile.size * kTokenBytes<F>;
        uint8_t* to = (uint8_t*)tile.tokens;
        for (int64_t t = 0; t < tile.count; t++) {
            const uint8_t* from = j.token_rows + j.order[tile.begin + t] / K * j.token_row_bytes;
            for (int64_t step = 0; step < j.hp / kStep; step++) {
                std::memcpy(to + step * block + t * values, from + step * kTokenBytes<F>, values);
                if constexpr (F::kInteger)
                    *step_scale<F>(to + step * block, tile.size, t) =
                        *step_scale<F>(from + step * kTokenBytes<F>, 1, 0);
            }
        }
        return;
    }
    float* sums = (float*)(j.slots + slot * j.slot_bytes);
    if (phase == 2) {  // some panels of the first matrix of one expert, for all its tokens
        const Group& g = j.groups[task / j.h_tasks];
        const Tile* tiles = j.tiles + g.first_tile;
        const Matrix m = matrix(l, c.experts[g.expert], false, j.hp, j.h_panels);
        const int64_t first = task % j.h_tasks * j.h_run, last = std::min(first + j.h_run, j.h_panels);
        for (int64_t panel = first; panel < last; panel++) {
            panel_times_tiles<F>(m, panel, tiles, g.num_tiles, nullptr, sums);
            finish_inner<F>(j, panel, tiles, g.num_tiles, sums);
        }
        return;
    }
    // some panels of the output: every expert's share, then the picks of each token in the router's order
    const int64_t first = task * j.out_run, last = std::min(first + j.out_run, j.out_panels);
    for (int64_t n = 0; n < j.num_groups; n++) {
        const Group& g = j.groups[n];
        const Tile* tiles = j.tiles + g.first_tile;
        const Matrix m = matrix(l, c.experts[g.expert], true, j.fp, j.out_panels);
        for (int64_t panel = first; panel < last; panel++)
            panel_times_tiles<F>(m, panel, tiles, g.num_tiles, j.inner_tiles,
                                 sums + ((panel - first) * j.padded + tiles->begin) * kPanel);
    }
    for (int64_t panel = first; panel < last; panel++) combine(j, panel, sums + (panel - first) * j.padded * kPanel);
}

// Cuts a scratch buffer into parts on multiples of 64 bytes.
struct Cutter {
    uint8_t* at;
    template <class T>
    T* take(int64_t count) {
        T* part = (T*)at;
        at += (count * (int64_t)sizeof(T) + 63) / 64 * 64;
        return part;
    }
};

template <class F>
int32_t run_layer(const HotsetLayer& l, const HotsetCall& c) {
    static Scratch scratch;  // one job at a time: guarded by the pool's gate
    Pool& pool = Pool::instance();
    std::lock_guard<std::mutex> hold(pool.gate());
    Job j;
    j.layer = &l;
    j.call = &c;
    j.hp = (l.hidden + kStep - 1) / kStep * kStep;
    j.fp = (l.intermediate + kStep - 1) / kStep * kStep;
    const int made = l.gated ? kPanel / 2 : kPanel;
    j.h_panels = (l.intermediate + made - 1) / made;
    j.out_panels = (l.hidden + kPanel - 1) / kPanel;
    j.token_row_bytes = j.hp / kStep * kTokenBytes<F>;
    const int64_t inner_row_bytes = j.fp / kStep * kTokenBytes<F>;
    const int64_t K = c.top_k, most = c.num_tokens < kMaxTokens ? c.num_tokens : kMaxTokens, picks = most * K;
    const int64_t most_groups = picks < l.num_experts ? picks : l.num_experts, padded = picks + most_groups;
    const int threads = c.threads > 0 ? c.threads : 1;
    // few tokens: runs of panels as long as four tasks per thread allow; many: one panel, whose sums stay in the cache
    j.out_run = most <= 8 ? std::max<int64_t>(1, j.out_panels / (4 * threads)) : 1;
    j.out_tasks = (j.out_panels + j.out_run - 1) / j.out_run;
    j.padded = padded;

    uint8_t* start_of_scratch = scratch.data;
    int64_t* next = nullptr;
    Group* groups = nullptr;
    Tile* tiles = nullptr;
    int32_t *gathered = nullptr, *order = nullptr, *place = nullptr;
    auto cut = [&](uint8_t* base) {
        Cutter cutter{base};
        next = cutter.take<int64_t>(l.num_experts + 1);
        groups = cutter.take<Group>(most_groups);
        tiles = cutter.take<Tile>(padded);
        gathered = cutter.take<int32_t>(padded);
        order = cutter.take<int32_t>(padded);
        place = cutter.take<int32_t>(picks);
        j.token_rows = cutter.take<uint8_t>(most * j.token_row_bytes);
        j.token_tiles = cutter.take<uint8_t>(padded * j.token_row_bytes);
        j.inner_tiles = cutter.take<uint8_t>(padded * inner_row_bytes);
        j.slot_bytes = (j.out_run * padded * kPanel * (int64_t)sizeof(float) + 63) / 64 * 64 + 64;
        j.slots = cutter.take<uint8_t>(threads * j.slot_bytes);
        return (size_t)(cutter.at - base);
    };
    if (!scratch.reserve(cut(start_of_scratch))) return kNoMemory;
    cut(scratch.data);
    j.groups = groups;
    j.tiles = tiles;
    j.gathered = gathered;
    j.order = order;
    j.place = place;
    for (j.first_token = 0; j.first_token < c.num_tokens; j.first_token += j.num_tokens) {
        j.num_tokens = c.num_tokens - j.first_token < kMaxTokens ? c.num_tokens - j.first_token : kMaxTokens;
        const int64_t n = j.num_tokens * K, offset = j.first_token * K;
        std::memset(next, 0, (l.num_experts + 1) * sizeof(int64_t));
        auto id_of = [&](int64_t i) {
            const int64_t id = read_id(c, offset + i);
            return id >= 0 && id < l.num_experts ? id : l.num_experts;
        };
        for (int64_t i = 0; i < n; i++) next[id_of(i)]++;
        int64_t num_tiles = 0, num_gathered = 0, begin = 0;
        j.num_groups = 0;
        for (int64_t e = 0; e < l.num_experts; e++) {
            int64_t count = next[e];
            next[e] = begin;
            if (!count) continue;
            Group& g = groups[j.num_groups++];
            g = {e, num_tiles, (count + kLargestTile<F> - 1) / kLargestTile<F>};
            const int64_t size = compiled_size((count + g.num_tiles - 1) / g.num_tiles);
            for (int64_t i = 0; i < g.num_tiles; i++, count -= size) {
                Tile& tile = tiles[num_tiles];
                tile.begin = begin;
                tile.count = count < size ? count : size;
                tile.size = compiled_size(tile.count);
                tile.tokens = j.token_tiles + begin * j.token_row_bytes;
                if (tile.size > 1) gathered[num_gathered++] = (int32_t)num_tiles;
                begin += tile.size;
                num_tiles++;
            }
        }
        for (int64_t i = 0; i < n; i++) {
            const int64_t id = id_of(i);
            place[i] = -1;
            if (id == l.num_experts) continue;
            place[i] = (int32_t)next[id]++;
            order[place[i]] = (int32_t)i;
        }
        for (int64_t i = 0; i < num_tiles; i++)
            if (tiles[i].size == 1) tiles[i].tokens = j.token_rows + order[tiles[i].begin] / K * j.token_row_bytes;
        j.h_run = std::clamp<int64_t>(j.num_groups * j.h_panels / (8 * threads), 1, j.h_panels);
        j.h_tasks = (j.h_panels + j.h_run - 1) / j.h_run;
        const int64_t tasks[4] = {j.num_groups ? j.num_tokens : 0, num_gathered, j.num_groups * j.h_tasks, j.out_tasks};
        pool.run(&j, run_task<F>, 4, tasks, threads, c.openmp);
    }
    return kOk;
}

}  // namespace

extern "C" {

int32_t hotset_moe(const HotsetLayer* layer, HotsetCall* call) {
    for (int64_t i = 0; i < call->num_tokens * call->top_k; i++) {
        int64_t id = read_id(*call, i);
        if (id == -1 || id == layer->num_experts) continue;
        call->bad_id = (int32_t)id;
        if (id < 0 || id > layer->num_experts) return kBadId;
        if (!call->experts[id]) return kAbsent;
    }
    switch (layer->format) {
        case kF32: return run_layer<F32>(*layer, *call);
        case kF16: return run_layer<F16>(*layer, *call);
        case kBF16: return run_layer<BF16>(*layer, *call);
        case kI8: return run_layer<I8>(*layer, *call);
        case kI4: return layer->first_zeros < 0 ? run_layer<I4>(*layer, *call) : run_layer<I4Z>(*layer, *call);
        case kMXFP4: return run_layer<MXFP4>(*layer, *call);
        default: return run_layer<F8>(*layer, *call);
    }
}

// The sum that hotset_moe makes of a token's picks, for rows [T, K, H] that it made apart (`picks`): the same bits.
void hotset_combine(const HotsetLayer* layer, const HotsetCall* call) {
    const int64_t H = layer->hidden, K = call->top_k, bytes = size_of(call->out_number);
    for (int64_t t = 0; t < call->num_tokens; t++)
        for (int64_t h = 0; h < H; h += kLanes) {
            const int64_t width = std::min<int64_t>(H - h, kLanes);
            f32x16 total = {};
            for (int64_t pick = t * K; pick < (t + 1) * K; pick++) {
                const int64_t id = read_id(*call, pick);
                if (id < 0 || id >= layer->num_experts) continue;
                float row[kLanes] = {};
                std::memcpy(row, call->picks + pick * H + h, width * sizeof(float));
                const uint8_t* weight = call->weights + pick * size_of(call->weights_number);
                total = fma(splat(load_number(weight, call->weights_number)), load<f32x16>(row), total);
            }
            uint8_t numbers[kLanes * 4];
            store_numbers(numbers, call->out_number, total);
            std::memcpy(call->out + (t * H + h) * bytes, numbers, width * bytes);
        }
}

}  // extern "C"

namespace {

// Stored rows of a matrix. row_stride, k_stride in bytes; element: bytes that k_stride steps over (1 where several k's
// share a byte).
struct StoredRows {
    uint8_t* data;
    const int32_t* source_row;  // [panels * 64] row at each packed row, -1 = padding
    int64_t row_bytes, row_stride, k_stride, element;
};

// 16 rows x 64 bytes. Packing and unpacking touch whole cache lines of the stored rows: of rows that are 4096 bytes apart
// the first-level cache holds no more than eight.
constexpr int kLine = 64;

template <class T, bool kRead>
void copy_elements(uint8_t (*tile)[kLine], const StoredRows& s, const int32_t* rows, int64_t at, int64_t have) {
    for (int64_t b = 0; b < have; b += sizeof(T)) {
        uint8_t* k = s.data + (at + b) / (int64_t)sizeof(T) * s.k_stride;
        for (int r = 0; r < kLanes; r++) {
            if (rows[r] < 0) continue;
            uint8_t* stored = k + rows[r] * s.row_stride;
            if (kRead) std::memcpy(tile[r] + b, stored, sizeof(T));
            else std::memcpy(stored, tile[r] + b, sizeof(T));
        }
    }
}

// Bytes [at, at + have) of 16 rows, into or out of a tile; padding rows are left alone.
template <bool kRead>
void copy_tile(uint8_t (*tile)[kLine], const StoredRows& s, const int32_t* rows, int64_t at, int64_t have) {
    if (s.k_stride == s.element) {
        for (int r = 0; r < kLanes; r++) {
            if (rows[r] < 0) continue;
            uint8_t* stored = s.data + rows[r] * s.row_stride + at;
            if (have == kLine && kRead) std::memcpy(tile[r], stored, kLine);
            else if (have == kLine) std::memcpy(stored, tile[r], kLine);
            else if (kRead) std::memcpy(tile[r], stored, have);
            else std::memcpy(stored, tile[r], have);
        }
    } else if (s.element == 4) {
        copy_elements<uint32_t, kRead>(tile, s, rows, at, have);
    } else if (s.element == 2) {
        copy_elements<uint16_t, kRead>(tile, s, rows, at, have);
    } else {
        copy_elements<uint8_t, kRead>(tile, s, rows, at, have);
    }
}

// Where block r of panel p lies: all panels' blocks r follow each other.
int64_t place_of(int64_t block, int64_t panels) { return block % kBlocks * panels + block / kBlocks; }

}  // namespace

extern "C" {

// Packs rows into panels. flip is xored into every word that a row has; what it does not have becomes zero (such k's
// meet activations of zero).
void hotset_pack(uint8_t* packed, uint8_t* stored, const int32_t* source_row, int64_t panels, int64_t packed_words,
                 int64_t row_bytes, int64_t row_stride, int64_t k_stride, int64_t element, uint32_t flip) {
    const StoredRows s = {stored, source_row, row_bytes, row_stride, k_stride, element};
    for (int64_t block = 0; block < panels * kBlocks; block++) {
        uint8_t* to = packed + place_of(block, panels) * packed_words * 64;
        const int32_t* rows = source_row + block * kLanes;
        for (int64_t word = 0; word < packed_words; word += kLanes) {
            const int64_t have = std::clamp<int64_t>(row_bytes - word * 4, 0, kLine);
            u32x16 flips = u32x16{} + flip;
            alignas(64) uint8_t tile[kLanes][kLine];
            if (have < kLine) {
                std::memset(tile, 0, sizeof tile);
                for (int i = 0; i < kLanes; i++) flips[i] = i * 4 < have ? flip : 0;
            }
            copy_tile<true>(tile, s, rows, word * 4, have);
            u32x16 turned[kLanes];
            for (int r = 0; r < kLanes; r++) turned[r] = rows[r] < 0 ? u32x16{} : load<u32x16>(tile[r]) ^ flips;
            transpose(turned);
            const int64_t words = std::min<int64_t>(packed_words - word, kLanes);
            for (int64_t i = 0; i < words; i++) store(to + (word + i) * 64, turned[i]);
        }
    }
}

// The inverse; the stored rows are written.
void hotset_unpack(const uint8_t* packed, uint8_t* stored, const int32_t* source_row, int64_t panels,
                   int64_t packed_words, int64_t row_bytes, int64_t row_stride, int64_t k_stride, int64_t element,
                   uint32_t flip) {
    const StoredRows s = {stored, source_row, row_bytes, row_stride, k_stride, element};
    for (int64_t block = 0; block < panels * kBlocks; block++) {
        const uint8_t* from = packed + place_of(block, panels) * packed_words * 64;
        const int32_t* rows = source_row + block * kLanes;
        for (int64_t word = 0; word * 4 < row_bytes; word += kLanes) {
            const int64_t words = std::min<int64_t>(packed_words - word, kLanes);
            u32x16 turned[kLanes] = {};
            for (int64_t i = 0; i < words; i++) turned[i] = load<u32x16>(from + (word + i) * 64) ^ flip;
            transpose(turned);
            alignas(64) uint8_t tile[kLanes][kLine];
            std::memcpy(tile, turned, sizeof tile);
            copy_tile<false>(tile, s, rows, word * 4, std::min<int64_t>(row_bytes - word * 4, kLine));
        }
    }
}

// True where an E4M3 byte is NaN.
int32_t hotset_has_fp8_nan(const uint8_t* codes, int64_t count) {
    // eight at a time: 0x7f plus 1 sets the upper bit of its byte, and carries nowhere
    auto upper_bits = [](uint64_t eight) { return (eight & 0x7f7f7f7f7f7f7f7fu) + 0x0101010101010101u; };
    uint64_t found = 0, last = 0;
    int64_t i = 0;
    for (; i + 8 <= count; i += 8) found |= upper_bits(load<uint64_t>(codes + i));
    std::memcpy(&last, codes + i, count - i);
    return ((found | upper_bits(last)) & 0x8080808080808080u) != 0;
}

// ---- the ceiling: reading memory and doing nothing with it ---------------------------------------------------

struct Stream {
    const uint8_t* data;
    int64_t piece;  // bytes of one of the interleaved streams before all move on
    int32_t streams, ahead;
    uint64_t seen[1024];
};

}  // extern "C"

namespace {

template <int S>
u32x16 read_piece(const uint8_t* from, int64_t piece, int64_t ahead) {
    u32x16 sum[S] = {};
    for (int64_t i = 0; i < piece; i += 64)
#pragma GCC unroll 16
        for (int s = 0; s < S; s++) {
            __builtin_prefetch(from + s * piece + i + ahead, 0, kPrefetchHint);
            sum[s] ^= load<u32x16>(from + s * piece + i);
        }
    for (int s = 1; s < S; s++) sum[0] ^= sum[s];
    return sum[0];
}

void read_task(void* opaque, int, int64_t task, int slot) {
    Stream& s = *(Stream*)opaque;
    const uint8_t* from = s.data + task * s.piece * s.streams;
    u32x16 x = s.streams == 1   ? read_piece<1>(from, s.piece, s.ahead)
               : s.streams == 4 ? read_piece<4>(from, s.piece, s.ahead)
               : s.streams == 8 ? read_piece<8>(from, s.piece, s.ahead)
                                : read_piece<16>(from, s.piece, s.ahead);
    uint64_t mixed = 0;
    for (int i = 0; i < 16; i++) mixed = mixed * 31 + x[i];
    s.seen[slot & 1023] ^= mixed;
}

}  // namespace

extern "C" {

// Reads `bytes` once with 1, 4, 8 or 16 interleaved streams per thread. The result depends on every byte.
uint64_t hotset_read(const uint8_t* data, int64_t bytes, int32_t streams, int64_t piece, int32_t ahead,
                     int32_t threads) {
    static Stream s;
    Pool& pool = Pool::instance();
    std::lock_guard<std::mutex> hold(pool.gate());
    s.data = data;
    s.piece = piece;
    s.streams = streams;
    s.ahead = ahead;
    std::memset(s.seen, 0, sizeof s.seen);
    const int64_t tasks = bytes / (piece * streams);
    pool.run(&s, read_task, 1, &tasks, threads > 0 ? threads : 1, nullptr);
    uint64_t mixed = 0;
    for (uint64_t x : s.seen) mixed ^= x;
    return mixed;
}

// Names of the instructions in use, space-separated.
const char* hotset_instructions() {
    return ""
#if defined(HOTSET_AVX512)
           "AVX-512"
#elif defined(__AVX2__) && !defined(HOTSET_GENERIC)
           "AVX2"
#elif defined(__aarch64__)
           "NEON"
#else
           "plain"
#endif
#if defined(HOTSET_BF16)
           " AVX512-BF16"
#endif
#if defined(HOTSET_VNNI)
           " AVX512-VNNI"
#endif
#if defined(HOTSET_VBMI)
           " AVX512-VBMI"
#endif
#if defined(__ARM_FEATURE_MATMUL_INT8) && !defined(HOTSET_GENERIC)
           " I8MM"
#endif
        ;
}

int32_t hotset_abi() { return 5; }
}
