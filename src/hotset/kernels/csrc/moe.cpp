// Routed experts of one layer on the host: [T, H] tokens and their picks in, [T, H] (or each pick's own row) out.
//
// Packed layout of a matrix [N, K]: rows in panels of 64 = 4 blocks of 16; a block is one stream of 64-byte words, word i holding bytes
// 4i..4i+3 of its 16 rows. A panel is read as four interleaved streams with prefetch, every word is used for all tokens of the expert at
// hand, and nothing is ever summed across lanes: lane r is row r. Panels of a gated first matrix hold 32 gate rows and the 32 up rows
// that meet them, so a task ends with 32 finished activations.
//
// What a token's result is does not depend on threads, on other tokens, or on which experts are present: each output row of each pick is one
// chain of operations in one order, and picks are combined in the order of the router.
//
// Does not know: where weights come from, how scales were checked, Python.

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <new>

#include "pool.h"
#include "simd.h"

namespace {

constexpr int kLanes = 16, kBlocks = 4, kPanel = kLanes * kBlocks;
constexpr int kStep = 32;      // k's per step: the group of quantised activations; K is padded to it
constexpr int kTile = 6;       // tokens that one pass over a panel serves: 4 x 6 sums fit 32 vector registers
constexpr int kChunkK = 2048;  // k's of a panel used for all token tiles before going on: 128 KiB of bfloat16, for the L2 cache
constexpr int kPrefetch = 1024;

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
            u32x16 e = __builtin_convertvector(load<u8x16>(from), u32x16);
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

// One activation row of k's as a kernel wants it. Integer formats: kp signed bytes, then per step {float scale, int32 start}.
struct StepScale {
    float scale;
    int32_t start;  // cancels the offset of unsigned weights: -offset times the sum of the step's activations
};

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
        return {from_f16(__builtin_convertvector(w & 0xffff, u16x16)), from_f16(__builtin_convertvector(w >> 16, u16x16))};
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
    static constexpr bool kInteger = false, kScaled = true;
    using Wide = Fp8Words;
    INLINE Wide widen(u32x16 w) { return Fp8Words::of(w); }
    INLINE f32x16 dot(f32x16 sum, const Wide& w, const uint8_t* a) {
        return Fp8Words::dot(sum, w, load<uint32_t>(a), load<uint32_t>(a + 4));
    }
};
struct I8 {  // stored with the sign bit flipped: byte = weight + 128
    static constexpr int kKs = 4, kBytes = 4, kOffset = 128;
    static constexpr float kUnit = 1.0f;
    static constexpr bool kInteger = true, kScaled = true;
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
    static constexpr bool kInteger = true, kScaled = true;
    using Wide = Nibbles;
    INLINE Wide widen(u32x16 w) { return {w & 0x0f0f0f0fu, (w >> 4) & 0x0f0f0f0fu}; }
    INLINE i32x16 dot(i32x16 sum, const Wide& w, const uint8_t* a) {
        return dot_u8s8(dot_u8s8(sum, w.even, load<uint32_t>(a)), w.odd, load<uint32_t>(a + 4));
    }
};
struct MXFP4 {  // E2M1 code -> twice its value plus 12
    static constexpr int kKs = 8, kBytes = 8, kOffset = 12;
    static constexpr float kUnit = 0.5f;
    static constexpr bool kInteger = true, kScaled = true;
    using Wide = Nibbles;
    INLINE Wide widen(u32x16 w) {
        const u8x16 table = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
        return {lookup16(table, w & 0x0f0f0f0fu), lookup16(table, (w >> 4) & 0x0f0f0f0fu)};
    }
    INLINE i32x16 dot(i32x16 sum, const Wide& w, const uint8_t* a) { return I4::dot(sum, w, a); }
};

// Bytes of a prepared activation row.
template <class F>
int64_t row_bytes(int64_t kp) {
    int64_t bytes = kp / F::kKs * F::kBytes + (F::kInteger ? kp / kStep * (int64_t)sizeof(StepScale) : 0);
    return (bytes + 63) / 64 * 64 + 64;  // never a power of two: rows of one tile must not share their cache sets
}

// Writes step `step` (32 k's) of a prepared row.
template <class F>
void prepare_step(uint8_t* row, int64_t kp, int64_t step, const float* x) {
    uint8_t* to = row + step * (kStep / F::kKs * F::kBytes);
    if constexpr (F::kInteger) {
        f32x16 a = load<f32x16>(x), b = load<f32x16>(x + 16);
        f32x16 most = select((i32x16)(a < 0), -a, a), other = select((i32x16)(b < 0), -b, b);
        most = select((i32x16)(most < other), other, most);
        float peak = 0;
        for (int i = 0; i < 16; i++) peak = most[i] > peak ? most[i] : peak;
        bool finite = peak <= 3.0e38f;
        for (int i = 0; i < 16; i++) finite &= a[i] - a[i] == 0 && b[i] - b[i] == 0;
        StepScale& scale = *(StepScale*)(row + kp / F::kKs * F::kBytes + step * (int64_t)sizeof(StepScale));
        if (!finite) {  // NaN or infinity: everything that meets this step becomes NaN
            std::memset(to, 0, kStep);
            scale = {as_float(0x7fc00000u), 0};
            return;
        }
        float inverse = peak > 1.0e-35f ? 127.0f / peak : 0.0f;
        int8_t q[kStep];
        int32_t sum = 0;
        for (int i = 0; i < kStep; i++) {
            q[i] = (int8_t)std::lrintf(x[i] * inverse);
            sum += q[i];
        }
        for (int i = 0; i < kStep; i++) {
            int j = F::kKs == 8 ? (i & ~7) + (i & 1) * 4 + ((i & 7) >> 1) : i;
            to[j] = (uint8_t)q[i];
        }
        scale = {peak / 127.0f * F::kUnit, -F::kOffset * sum};
    } else if constexpr (F::kBytes / F::kKs == 2) {
        for (int half = 0; half < 2; half++) {
            u16x16 h = to_bf16(load<f32x16>(x + 16 * half));
            if (F::kKs == 4) {
                u16x16 swapped;
                for (int i = 0; i < 16; i++) swapped[i] = h[(i & ~3) + ((i & 1) << 1) + ((i & 2) >> 1)];
                h = swapped;
            }
            store(to + 32 * half, h);
        }
    } else {
        std::memcpy(to, x, kStep * sizeof(float));
    }
}

struct Matrix {
    const uint8_t* data;
    const uint8_t* scales;  // [panel][group][64], or one group per panel where scales are per row
    const float* bias;      // [panel][64], or null
    int64_t kp;             // padded K
    int64_t panel_bytes, panel_scale_bytes;
    int32_t scale_number;
    int32_t group_steps;  // steps that share a scale
};

// out[t][64] (+)= panel times token t, over steps [first, last). `out` carries the sums of the steps before.
template <class F, int NT>
void panel_times(const Matrix& m, int64_t panel, int64_t first, int64_t last, const uint8_t* const* rows, float* out) {
    constexpr int kWords = kStep / F::kKs;
    const int64_t stride = m.kp / F::kKs * 64;
    const uint8_t* data = m.data + panel * m.panel_bytes + first * kWords * 64;
    f32x16 total[kBlocks][NT];
    for (int r = 0; r < kBlocks; r++)
        for (int t = 0; t < NT; t++) total[r][t] = load<f32x16>(out + t * kPanel + r * kLanes);
    const uint8_t* a[NT];
    for (int t = 0; t < NT; t++) a[t] = rows[t] + first * (kWords * F::kBytes);

    if constexpr (!F::kScaled) {
        for (int64_t word = 0; word < (last - first) * kWords; word++) {
            typename F::Wide w[kBlocks];
#pragma GCC unroll 4
            for (int r = 0; r < kBlocks; r++) {
                const uint8_t* from = data + r * stride + word * 64;
                __builtin_prefetch(from + kPrefetch);
                w[r] = F::widen(load<u32x16>(from));
            }
#pragma GCC unroll 8
            for (int t = 0; t < NT; t++)
#pragma GCC unroll 4
                for (int r = 0; r < kBlocks; r++) total[r][t] = F::dot(total[r][t], w[r], a[t] + word * F::kBytes);
        }
    } else {
        const int number = m.scale_number, scale_block = kLanes * size_of(number);
        const uint8_t* scales = m.scales + panel * m.panel_scale_bytes + first / m.group_steps * kBlocks * scale_block;
        int64_t left = m.group_steps - first % m.group_steps;
        for (int64_t step = first; step < last; step++) {
            __builtin_prefetch(scales + 512);
#pragma GCC unroll 4
            for (int r = 0; r < kBlocks; r++) {
                const uint8_t* from = data + r * stride;
                f32x16 scale = load_numbers(scales + r * scale_block, number);
                if constexpr (F::kInteger) {
                    const StepScale* step_scale[NT];
                    i32x16 sum[NT];
                    for (int t = 0; t < NT; t++) {
                        step_scale[t] = (const StepScale*)(rows[t] + m.kp / F::kKs * F::kBytes) + step;
                        sum[t] = i32x16{} + step_scale[t]->start;
                    }
#pragma GCC unroll 8
                    for (int word = 0; word < kWords; word++) {
                        __builtin_prefetch(from + word * 64 + kPrefetch);
                        typename F::Wide w = F::widen(load<u32x16>(from + word * 64));
#pragma GCC unroll 8
                        for (int t = 0; t < NT; t++) sum[t] = F::dot(sum[t], w, a[t] + word * F::kBytes);
                    }
                    for (int t = 0; t < NT; t++) {
                        f32x16 part = __builtin_convertvector(sum[t], f32x16) * step_scale[t]->scale;
                        total[r][t] = fma(part, scale, total[r][t]);
                    }
                } else {
                    f32x16 sum[NT] = {};
#pragma GCC unroll 8
                    for (int word = 0; word < kWords; word++) {
                        __builtin_prefetch(from + word * 64 + kPrefetch);
                        typename F::Wide w = F::widen(load<u32x16>(from + word * 64));
#pragma GCC unroll 8
                        for (int t = 0; t < NT; t++) sum[t] = F::dot(sum[t], w, a[t] + word * F::kBytes);
                    }
                    for (int t = 0; t < NT; t++) total[r][t] = fma(sum[t], scale, total[r][t]);
                }
            }
            data += kWords * 64;
            for (int t = 0; t < NT; t++) a[t] += kWords * F::kBytes;
            if (--left == 0) {
                left = m.group_steps;
                scales += kBlocks * scale_block;
            }
        }
    }
    for (int r = 0; r < kBlocks; r++)
        for (int t = 0; t < NT; t++) store(out + t * kPanel + r * kLanes, total[r][t]);
}

// out[i][64] = panel times row i, plus bias, for `count` rows.
template <class F>
void panel_times_rows(const Matrix& m, int64_t panel, const uint8_t* const* rows, int64_t count, float* out) {
    for (int64_t i = 0; i < count; i++)
        for (int b = 0; b < kBlocks; b++) store(out + i * kPanel + b * kLanes, f32x16{});
    const int64_t steps = m.kp / kStep, tiles = (count + kTile - 1) / kTile, chunk = tiles > 1 ? kChunkK / kStep : steps;
    for (int64_t first = 0; first < steps; first += chunk) {
        int64_t last = first + chunk < steps ? first + chunk : steps, done = 0;
        for (int64_t tile = 0; tile < tiles; tile++) {
            int64_t size = (count - done) / (tiles - tile);  // even tiles: 7 is 3 + 4
            const uint8_t* const* r = rows + done;
            float* o = out + done * kPanel;
            switch (size) {
                case 1: panel_times<F, 1>(m, panel, first, last, r, o); break;
                case 2: panel_times<F, 2>(m, panel, first, last, r, o); break;
                case 3: panel_times<F, 3>(m, panel, first, last, r, o); break;
                case 4: panel_times<F, 4>(m, panel, first, last, r, o); break;
                case 5: panel_times<F, 5>(m, panel, first, last, r, o); break;
                default: panel_times<F, 6>(m, panel, first, last, r, o);
            }
            done += size;
        }
    }
    if (m.bias)
        for (int b = 0; b < kBlocks; b++) {
            f32x16 bias = load<f32x16>(m.bias + panel * kPanel + b * kLanes);
            for (int64_t i = 0; i < count; i++) {
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

// One layer. Offsets are from the start of an expert's packed buffer; scale and bias offsets are negative where there are none.
struct HotsetLayer {
    int64_t num_experts, hidden, intermediate;
    int32_t format, scale_number, gated, activation;
    float alpha, limit, up_offset;
    int32_t reserved;
    int64_t first_group_steps, second_group_steps;  // steps of 32 k's that share a scale
    int64_t first_scales, first_bias, second_data, second_scales, second_bias;
};

// One call. ids: [T, K] (bytes each: id_bytes); an id of -1 or num_experts is no pick. experts: [E] packed buffers, null = absent.
struct HotsetCall {
    const uint8_t* const* experts;
    const uint8_t* tokens;      // [T, H], tokens_number
    const uint8_t* ids;         // [T, K]
    const uint8_t* weights;     // [T, K], weights_number
    uint8_t* out;               // [T, H], out_number: sum over k of weight times pick; or null
    float* picks;               // [T, K, H]: every pick's own row, unweighted, zero for no pick; or null
    int64_t num_tokens, top_k;
    int32_t id_bytes, tokens_number, weights_number, out_number, threads;
    int32_t bad_id;             // set where the call is refused
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
    int64_t expert, begin, end;  // picks of one expert, in sorted order
};

struct Job {
    const HotsetLayer* layer;
    const HotsetCall* call;
    int64_t first_token, num_tokens, num_groups, h_panels, out_panels, hp, fp;
    const Group* groups;
    const int32_t* order;  // sorted picks: index t * K + k within this pass
    uint8_t* token_rows;
    uint8_t* inner_rows;
    int64_t token_row_bytes, inner_row_bytes;
    uint8_t* slots;  // per thread
    int64_t slot_bytes;
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

Matrix matrix(const HotsetLayer& l, const uint8_t* expert, bool second, int64_t kp) {
    int64_t scales = second ? l.second_scales : l.first_scales, bias = second ? l.second_bias : l.first_bias;
    int64_t group = second ? l.second_group_steps : l.first_group_steps;
    Matrix m;
    m.data = expert + (second ? l.second_data : 0);
    m.scales = scales < 0 ? nullptr : expert + scales;
    m.bias = bias < 0 ? nullptr : (const float*)(expert + bias);
    m.kp = kp;
    m.panel_bytes = kp / words_of(l.format) * 64 * kBlocks;
    m.panel_scale_bytes = ((kp / kStep + group - 1) / group) * kPanel * size_of(l.scale_number);
    m.scale_number = l.scale_number;
    m.group_steps = (int32_t)group;
    return m;
}

template <class F>
void run_task(void* opaque, int phase, int64_t task, int slot) {
    const Job& j = *(const Job*)opaque;
    const HotsetLayer& l = *j.layer;
    const HotsetCall& c = *j.call;
    const int64_t K = c.top_k, H = l.hidden;
    if (phase == 0) {  // one token into the form that the kernel wants
        const uint8_t* token = c.tokens + (j.first_token + task) * H * size_of(c.tokens_number);
        uint8_t* row = j.token_rows + task * j.token_row_bytes;
        for (int64_t step = 0; step < j.hp / kStep; step++) {
            alignas(64) float x[kStep];
            for (int i = 0; i < kStep; i += 16) {
                int64_t k = step * kStep + i;
                if (k + 16 <= H) store(x + i, load_numbers(token + k * size_of(c.tokens_number), c.tokens_number));
                else
                    for (int q = 0; q < 16; q++)
                        x[i + q] = k + q < H ? load_number(token + (k + q) * size_of(c.tokens_number), c.tokens_number) : 0.0f;
            }
            prepare_step<F>(row, j.hp, step, x);
        }
        return;
    }
    uint8_t* base = j.slots + slot * j.slot_bytes;
    const uint8_t** rows = (const uint8_t**)base;
    float* sums = (float*)(base + (j.num_tokens * K * (int64_t)sizeof(void*) + 63) / 64 * 64);
    if (phase == 1) {  // 64 rows of the first matrix of one expert, for all its tokens
        const Group& g = j.groups[task / j.h_panels];
        const int64_t panel = task % j.h_panels, count = g.end - g.begin;
        for (int64_t i = 0; i < count; i++) rows[i] = j.token_rows + j.order[g.begin + i] / K * j.token_row_bytes;
        panel_times_rows<F>(matrix(l, c.experts[g.expert], false, j.hp), panel, rows, count, sums);
        const int made = l.gated ? kPanel / 2 : kPanel;
        for (int64_t i = 0; i < count; i++) {
            float* s = sums + i * kPanel;
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
                const int64_t row = panel * made + b;  // rows past F meet weights of zero, but inf * 0 would not be zero
                if (row + kLanes > l.intermediate)
                    for (int q = 0; q < kLanes; q++)
                        if (row + q >= l.intermediate) x[q] = 0.0f;
                store(s + b, x);
            }
            uint8_t* row = j.inner_rows + j.order[g.begin + i] * j.inner_row_bytes;
            for (int b = 0; b < made; b += kStep)
                if (panel * made + b < j.fp) prepare_step<F>(row, j.fp, (panel * made + b) / kStep, s + b);
        }
        return;
    }
    // 64 rows of the output: every expert's share, then the picks of each token in the router's order
    const int64_t width = H - task * kPanel < kPanel ? H - task * kPanel : kPanel;
    int32_t* place = (int32_t*)(sums + j.num_tokens * K * kPanel);  // of each pick in sorted order
    for (int64_t i = 0; i < j.num_tokens * K; i++) place[i] = -1;
    for (int64_t n = 0; n < j.num_groups; n++) {
        const Group& g = j.groups[n];
        for (int64_t i = g.begin; i < g.end; i++) {
            rows[i - g.begin] = j.inner_rows + j.order[i] * j.inner_row_bytes;
            place[j.order[i]] = (int32_t)i;
        }
        panel_times_rows<F>(matrix(l, c.experts[g.expert], true, j.fp), task, rows, g.end - g.begin, sums + g.begin * kPanel);
    }
    for (int64_t t = 0; t < j.num_tokens; t++) {
        alignas(64) float total[kPanel] = {};
        for (int64_t k = 0; k < K; k++) {
            const int64_t pick = t * K + k, global = (j.first_token + t) * K + k;
            const float* s = place[pick] < 0 ? nullptr : sums + place[pick] * kPanel;
            if (c.picks) {
                float* to = c.picks + global * H + task * kPanel;
                if (s) std::memcpy(to, s, width * sizeof(float));
                else std::memset(to, 0, width * sizeof(float));
            }
            if (!c.out || !s) continue;
            f32x16 weight = splat(load_number(c.weights + global * size_of(c.weights_number), c.weights_number));
            for (int b = 0; b < kPanel; b += kLanes) store(total + b, fma(weight, load<f32x16>(s + b), load<f32x16>(total + b)));
        }
        if (!c.out) continue;
        const int bytes = size_of(c.out_number);
        uint8_t* to = c.out + ((j.first_token + t) * H + task * kPanel) * bytes;
        if (width == kPanel) {
            for (int b = 0; b < kPanel; b += kLanes) store_numbers(to + b * bytes, c.out_number, load<f32x16>(total + b));
        } else {
            uint8_t full[kPanel * 4];
            for (int b = 0; b < kPanel; b += kLanes) store_numbers(full + b * bytes, c.out_number, load<f32x16>(total + b));
            std::memcpy(to, full, width * bytes);
        }
    }
}

template <class F>
int32_t run_layer(const HotsetLayer& l, const HotsetCall& c) {
    static Scratch row_scratch, group_scratch;  // one job at a time: guarded by the pool's gate
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
    j.token_row_bytes = row_bytes<F>(j.hp);
    j.inner_row_bytes = row_bytes<F>(j.fp);
    const int64_t K = c.top_k, most = c.num_tokens < kMaxTokens ? c.num_tokens : kMaxTokens, picks = most * K;
    j.slot_bytes = (picks * (int64_t)sizeof(void*) + 63) / 64 * 64 + picks * (kPanel * 4 + 4);
    j.slot_bytes = (j.slot_bytes + 63) / 64 * 64 + 64;
    const int threads = c.threads > 0 ? c.threads : 1;
    size_t rows = most * j.token_row_bytes, inner = picks * j.inner_row_bytes;
    if (!row_scratch.reserve(rows + inner + threads * j.slot_bytes)) return kNoMemory;
    if (!group_scratch.reserve((l.num_experts + 1) * 8 + l.num_experts * sizeof(Group) + picks * 4)) return kNoMemory;
    j.token_rows = row_scratch.data;
    j.inner_rows = j.token_rows + rows;
    j.slots = j.inner_rows + inner;
    int64_t* start = (int64_t*)group_scratch.data;
    Group* groups = (Group*)(start + l.num_experts + 1);
    int32_t* order = (int32_t*)(groups + l.num_experts);
    j.groups = groups;
    j.order = order;
    for (j.first_token = 0; j.first_token < c.num_tokens; j.first_token += j.num_tokens) {
        j.num_tokens = c.num_tokens - j.first_token < kMaxTokens ? c.num_tokens - j.first_token : kMaxTokens;
        std::memset(start, 0, (l.num_experts + 1) * sizeof(int64_t));
        const int64_t n = j.num_tokens * K, offset = j.first_token * K;
        auto id_of = [&](int64_t i) {
            int64_t id = read_id(c, offset + i);
            return id >= 0 && id < l.num_experts ? id : -1;
        };
        for (int64_t i = 0; i < n; i++)
            if (int64_t id = id_of(i); id >= 0) start[id + 1]++;
        j.num_groups = 0;
        for (int64_t e = 0; e < l.num_experts; e++) {
            if (start[e + 1]) groups[j.num_groups++] = {e, start[e], start[e] + start[e + 1]};
            start[e + 1] += start[e];
        }
        for (int64_t i = 0; i < n; i++)
            if (int64_t id = id_of(i); id >= 0) order[start[id]++] = (int32_t)i;
        const int64_t tasks[3] = {j.num_groups ? j.num_tokens : 0, j.num_groups * j.h_panels, j.out_panels};
        pool.run(&j, run_task<F>, 3, tasks, threads);
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
        case kI4: return run_layer<I4>(*layer, *call);
        case kMXFP4: return run_layer<MXFP4>(*layer, *call);
        default: return run_layer<F8>(*layer, *call);
    }
}

// Packs rows into panels. source_row: [panels * 64] row of the source, or -1 for padding. row_bytes: bytes of one row of K elements;
// row_stride, k_stride in bytes; element: bytes that k_stride steps over (1 where several k's share a byte). flip is xored into every
// word; what the source does not have becomes zero (before the flip nothing: such k's meet activations of zero).
void hotset_pack(uint8_t* packed, const uint8_t* source, const int32_t* source_row, int64_t panels, int64_t packed_words, int64_t row_bytes,
                 int64_t row_stride, int64_t k_stride, int64_t element, uint32_t flip) {
    const bool dense = k_stride == element;
    for (int64_t block = 0; block < panels * kBlocks; block++) {
        uint8_t* to = packed + block * packed_words * 64;
        const int32_t* rows = source_row + block * kLanes;
        for (int64_t word = 0; word < packed_words; word++, to += 64)
            for (int r = 0; r < kLanes; r++) {
                uint32_t value = 0;
                const int64_t at = word * 4, have = row_bytes - at < 4 ? row_bytes - at : 4;
                if (rows[r] >= 0 && have > 0) {
                    const uint8_t* from = source + rows[r] * row_stride;
                    if (dense && have == 4) value = load<uint32_t>(from + at);
                    else if (dense) std::memcpy(&value, from + at, have);
                    else
                        for (int64_t b = 0; b < have; b += element)
                            std::memcpy((uint8_t*)&value + b, from + (at + b) / element * k_stride, element);
                    value ^= flip;
                }
                store(to + r * 4, value);
            }
    }
}

// The inverse: rows of [row_bytes] contiguous bytes.
void hotset_unpack(uint8_t* rows_out, const uint8_t* packed, const int32_t* source_row, int64_t panels, int64_t packed_words, int64_t row_bytes,
                   uint32_t flip) {
    for (int64_t block = 0; block < panels * kBlocks; block++) {
        const uint8_t* from = packed + block * packed_words * 64;
        const int32_t* rows = source_row + block * kLanes;
        for (int64_t word = 0; word * 4 < row_bytes; word++)
            for (int r = 0; r < kLanes; r++) {
                if (rows[r] < 0) continue;
                uint32_t value = load<uint32_t>(from + word * 64 + r * 4) ^ flip;
                const int64_t have = row_bytes - word * 4 < 4 ? row_bytes - word * 4 : 4;
                std::memcpy(rows_out + rows[r] * row_bytes + word * 4, &value, have);
            }
    }
}

// True where an E4M3 byte is NaN.
int32_t hotset_has_fp8_nan(const uint8_t* codes, int64_t count) {
    int found = 0;
    for (int64_t i = 0; i < count; i++) found |= (codes[i] & 0x7f) == 0x7f;
    return found;
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
            __builtin_prefetch(from + s * piece + i + ahead);
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
uint64_t hotset_read(const uint8_t* data, int64_t bytes, int32_t streams, int64_t piece, int32_t ahead, int32_t threads) {
    static Stream s;
    Pool& pool = Pool::instance();
    std::lock_guard<std::mutex> hold(pool.gate());
    s.data = data;
    s.piece = piece;
    s.streams = streams;
    s.ahead = ahead;
    std::memset(s.seen, 0, sizeof s.seen);
    const int64_t tasks = bytes / (piece * streams);
    pool.run(&s, read_task, 1, &tasks, threads > 0 ? threads : 1);
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

int32_t hotset_abi() { return 1; }
}
