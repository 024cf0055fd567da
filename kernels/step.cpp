// One step of the objective on a CPU, fused: candidate sets, loss terms, both gradients and the label state.
//
// The Python modules beside this file are the truth: philox.py (random words), candidates.py (sets and prior),
// terms.py (loss terms), closed_form.py (gradients). Symbols and equations are theirs. Random words, coverage
// labels and candidate sets equal theirs to the last bit; sums and exponentials agree to float32 rounding.
//
// Axes: B rows of this rank, C classes, K draws, N samples it keeps, R rows of the window. A row in scratch memory is
// padded to whole vectors, so that only reading and writing a row knows of tails.
//
// Results do not depend on the number of threads: rows are cut into chunks by B alone, and what is summed over
// rows is summed within a chunk and then over chunks in order.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>

#if defined(__AVX512F__) && defined(__GNUC__) && !defined(__clang__)
// GCC 12's own AVX-512 header warns of the undefined operands it passes on purpose.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

// The call's arguments, mirrored by cpu.py. Every field is eight bytes wide, so neither side pads.
struct Step {
    int64_t B, C, K, N, R, X, threads;
    const void* z;           // [B, C], z_dtype, rows z_stride elements apart
    const void* t;           // [B, K, C], z_dtype, strides t_stride_b and t_stride_k
    void* M;                 // [N, C], table_dtype
    const int64_t* labels;   // [B]
    const int64_t* ids;      // [B]: of the samples, for random words only
    const int64_t* slots;    // [B]: the samples' rows of M, w and loss_N
    const int64_t* clean;    // [B] or null
    const int64_t* cover;    // [X, B] or null: coverage labels given (cover_mode 3)
    const float* w;          // [N]
    float* loss_N;           // [N]
    int64_t* step;           // [1]
    const int64_t* epoch;    // [1]
    float* column_sum_C;     // [C] or null
    float* window_RC;        // [R, C] or null
    const float* given_D;    // [C] or null: a detached denominator
    void* grad_z;            // [B, C], z_dtype, or null
    void* grad_t;            // [B, K, C], z_dtype, or null
    float* loss;             // []
    float* terms;            // [4]: ce, prior, estep, what 1 in the gradients stands for
    float* sample_loss;      // [B]
    int64_t* set_size;       // [B]
    uint8_t* covered;        // [B] or null
    float* sums;             // [C live + C old (dataset) + 1 rows]
    float* through;          // [C sum of V + C delta (dataset)]
    float* stats;            // [8, B]
    uint32_t* bits;          // [B, ceil(C / 32)]: the candidate sets
    float* D;                // [C]
    int64_t z_stride, t_stride_b, t_stride_k;
    int64_t z_dtype, table_dtype, half, live, dataset, update;
    double world, rows;
    int64_t warmup_epochs, cap, cover_mode, random_labels, additive, direction, prior_kl, power, network;
    uint64_t seed;
    double beta, mix, weight_ce, weight_prior, weight_estep;
};

#define ALWAYS_INLINE __attribute__((always_inline)) inline
#define NEVER_INLINE __attribute__((noinline))

namespace {

enum Dtype { FLOAT32, FLOAT16, BFLOAT16 };
enum CoverMode { COVER_NONE, COVER_SAMPLE, COVER_ARGMAX, COVER_GIVEN };
enum Direction { Y_TO_X, X_TO_Y };
enum PriorKL { REVERSE, FORWARD, CE };
enum Kind { COVERAGE, FREE, WARMUP };
enum Stat { MAXIMUM, LOG_SUM, INVERSE_Z, MEAN_G, INVERSE_TOTAL, OWN_COVER };

constexpr float FLOOR = 1e-9f;      // p outside the set
constexpr float LOG_FLOOR = -20.7232658f;
constexpr float TINY = 1e-37f;      // added to every D_j
constexpr float CLIP = 1e-4f;       // the moving average takes in q clipped to [CLIP, 1 - CLIP]
constexpr float PADDING = -1e30f;   // logit of a class that is not there: q = 0, and q times it is 0, not NaN
constexpr float LARGEST_RATIO = 1e30f;
constexpr float HALF_UNITS = 64.0f;  // a gradient in float16 is kept as this many units a row: see step.py
constexpr int SMALL = 32;           // classes up to which a vector holds one class of several rows

// ---------------------------------------------------------------------------------------------------------------
// Vectors: GCC's vector extension, and the few operations it has no word for.

#if defined(__AVX512F__) && defined(__AVX512DQ__)
#define FASTGNL_AVX512
constexpr int LANES = 16;
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define FASTGNL_AVX2
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float F __attribute__((vector_size(4 * LANES)));
typedef int32_t I __attribute__((vector_size(4 * LANES)));
typedef uint32_t U __attribute__((vector_size(4 * LANES)));
typedef uint64_t W __attribute__((vector_size(4 * LANES)));  // one 32-bit word in each low half, the rest is noise
typedef float F4 __attribute__((vector_size(16)));
typedef int32_t I4 __attribute__((vector_size(16)));

template <class V, class T>
inline V load(const T* from) {
    V v;
    std::memcpy(&v, from, sizeof v);
    return v;
}

template <class V, class T>
inline void store(T* to, V v) {
    std::memcpy(to, &v, sizeof v);
}

inline F row(const float* from) { return load<F>(from); }
inline F all(float x) { return x - F{}; }
inline U all(uint32_t x) { return x - U{}; }
inline I all(int32_t x) { return x - I{}; }
inline W all(uint64_t x) { return x - W{}; }

// GCC makes no min or max instruction of a comparison, for the sake of NaN. Here a NaN in `a` gives b.
inline F smaller(F a, F b) {
#if defined(FASTGNL_AVX512)
    return (F)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(FASTGNL_AVX2)
    return (F)_mm256_min_ps((__m256)a, (__m256)b);
#else
    return a < b ? a : b;
#endif
}

inline F larger(F a, F b) {
#if defined(FASTGNL_AVX512)
    return (F)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(FASTGNL_AVX2)
    return (F)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return a > b ? a : b;
#endif
}

inline I lane_numbers() {
    I v;
    for (int lane = 0; lane < LANES; ++lane) v[lane] = lane;
    return v;
}

inline F fma(F a, F b, F c) {
#if defined(FASTGNL_AVX512)
    return (F)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(FASTGNL_AVX2)
    return (F)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON) && defined(__aarch64__)
    return (F)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

// One bit a lane, set where the mask is.
inline uint32_t lane_bits(I mask) {
#if defined(FASTGNL_AVX512)
    return (uint32_t)_mm512_movepi32_mask((__m512i)mask);
#elif defined(FASTGNL_AVX2)
    return (uint32_t)_mm256_movemask_ps((__m256)mask);
#elif defined(__SSE2__)
    return (uint32_t)_mm_movemask_ps((__m128)mask);
#else
    uint32_t bits = 0;
    for (int lane = 0; lane < LANES; ++lane) bits |= (uint32_t)(mask[lane] & 1) << lane;
    return bits;
#endif
}

// Four lanes that hold `join` of all.
template <class Join>
inline F4 quarter(F v, Join join) {
#if defined(FASTGNL_AVX512)
    const F4 low = join((F4)_mm512_castps512_ps128((__m512)v), (F4)_mm512_extractf32x4_ps((__m512)v, 1));
    return join(low, join((F4)_mm512_extractf32x4_ps((__m512)v, 2), (F4)_mm512_extractf32x4_ps((__m512)v, 3)));
#elif defined(FASTGNL_AVX2)
    return join((F4)_mm256_castps256_ps128((__m256)v), (F4)_mm256_extractf128_ps((__m256)v, 1));
#else
    (void)join;
    return v;
#endif
}

inline float sum(F v) {
    const F4 x = quarter(v, [](F4 a, F4 b) { return a + b; });
    return (x[0] + x[2]) + (x[1] + x[3]);
}

inline float minimum(F v) {
    const F4 x = quarter(v, [](F4 a, F4 b) { return a < b ? a : b; });
    return std::min(std::min(x[0], x[2]), std::min(x[1], x[3]));
}

inline float maximum(F v) { return -minimum(-v); }

// Of counts below 2**24, which float32 adds exactly.
inline int64_t sum(I v) { return (int64_t)sum(__builtin_convertvector(v, F)); }

// 1.5 * 2**23: the low bits of x + MAGIC are round(x), and twice the bias of an exponent.
constexpr float MAGIC = 12582912.0f + 254.0f;

// e^x for x <= 0 to about 1.5 ulp, 0 below -104. NaN stays NaN. Several vectors in step: one alone is a chain of
// 60 cycles, and the processor does not look far enough ahead to fill them with the next ones.
template <int COUNT>
ALWAYS_INLINE void exp_negative(F (&x)[COUNT]) {
    F shifted[COUNT], r[COUNT], y[COUNT];
#pragma GCC unroll 8
    for (int i = 0; i < COUNT; ++i) {
        shifted[i] = fma(x[i], all(1.44269504f), all(MAGIC));
        r[i] = shifted[i] - all(MAGIC);
    }
#pragma GCC unroll 8
    for (int i = 0; i < COUNT; ++i) r[i] = fma(r[i], all(-1.42860677e-6f), fma(r[i], all(-0.693145752f), x[i]));
#pragma GCC unroll 8
    for (int i = 0; i < COUNT; ++i) y[i] = fma(r[i], all(0.00831235852f), all(0.0418912172f));
#pragma GCC unroll 8
    for (int i = 0; i < COUNT; ++i) y[i] = fma(y[i], r[i], all(0.166671202f));
#pragma GCC unroll 8
    for (int i = 0; i < COUNT; ++i) y[i] = fma(y[i], r[i], all(0.499992251f));
#pragma GCC unroll 8
    for (int i = 0; i < COUNT; ++i) y[i] = fma(y[i], r[i], all(1.0f));
#pragma GCC unroll 8
    for (int i = 0; i < COUNT; ++i) {
        // 2**n may be no normal number: as two factors, of which the second rounds as it should.
        const U half = (U)shifted[i] >> 1, rest = (U)shifted[i] - half;
        const F scaled = fma(y[i], r[i], all(1.0f)) * (F)(half << 23) * (F)(rest << 23);
        x[i] = (F)((U)scaled & ~(U)(x[i] < all(-104.0f)));
    }
}

// log x for normal x > 0, to about 1 ulp (the polynomial is that of Cephes' logf).
inline F log_positive(F x) {
    const I exponent = ((I)x - 0x3F3504F3) >> 23;
    const F f = (F)((U)x - ((U)exponent << 23)) - all(1.0f);
    const F n = __builtin_convertvector(exponent, F);
    const F f2 = f * f;
    F y = fma(all(7.0376836292e-2f), f, all(-1.1514610310e-1f));
    y = fma(fma(y, f, all(1.1676998740e-1f)), f, all(-1.2420140846e-1f));
    y = fma(fma(y, f, all(1.4249322787e-1f)), f, all(-1.6668057665e-1f));
    y = fma(fma(y, f, all(2.0000714765e-1f)), f, all(-2.4999993993e-1f));
    y = fma(y, f, all(3.3333331174e-1f)) * f * f2;
    y = fma(n, all(-2.12194440e-4f), y);
    y = fma(all(-0.5f), f2, y);
    return fma(n, all(0.693359375f), f + y) + (x - x);  // NaN stays NaN
}

inline float log_positive(float x) { return log_positive(all(x))[0]; }

// ---------------------------------------------------------------------------------------------------------------
// Rows in and out of memory.

inline float from_half(uint16_t h) {
#if defined(__F16C__)
    return _cvtsh_ss(h);
#else
    const uint32_t sign = (uint32_t)(h & 0x8000) << 16, magnitude = h & 0x7FFF;
    uint32_t bits = magnitude << 13;
    float value;
    if (magnitude >= 0x7C00) {
        bits |= 0x7F800000;
        std::memcpy(&value, &bits, 4);
    } else {
        std::memcpy(&value, &bits, 4);
        value *= 0x1p112f;  // moves the exponent's bias from 15 to 127, subnormals included
    }
    std::memcpy(&bits, &value, 4);
    bits |= sign;
    std::memcpy(&value, &bits, 4);
    return value;
#endif
}

inline uint16_t to_half(float value) {
#if defined(__F16C__)
    return _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT);
#else
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    const uint16_t sign = (uint16_t)((bits >> 16) & 0x8000);
    bits &= 0x7FFFFFFF;
    if (bits > 0x7F800000) return (uint16_t)(sign | 0x7E00);
    if (bits >= 0x477FF000) return (uint16_t)(sign | 0x7C00);  // 65520 and above round to infinity
    if (bits < 0x38800000) {                                   // subnormal: let the adder round at 2**-24
        float magnitude;
        std::memcpy(&magnitude, &bits, 4);
        magnitude += 0.5f;
        std::memcpy(&bits, &magnitude, 4);
        return (uint16_t)(sign | (bits - 0x3F000000));
    }
    bits += 0x0FFF + ((bits >> 13) & 1);
    return (uint16_t)(sign | ((bits - 0x38000000) >> 13));
#endif
}

inline float from_bfloat(uint16_t h) {
    const uint32_t bits = (uint32_t)h << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline uint16_t to_bfloat(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if (value != value) return 0x7FC0;
    return (uint16_t)((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

inline void widen_halves(const uint16_t* from, int64_t count, float* to) {
    int64_t j = 0;
#if defined(FASTGNL_AVX512)
    for (; j + LANES <= count; j += LANES) store(to + j, (F)_mm512_cvtph_ps(load<__m256i>(from + j)));
#elif defined(FASTGNL_AVX2)
    for (; j + LANES <= count; j += LANES) store(to + j, (F)_mm256_cvtph_ps(load<__m128i>(from + j)));
#endif
    for (; j < count; ++j) to[j] = from_half(from[j]);
}

inline void narrow_to_halves(const float* from, int64_t count, uint16_t* to) {
    int64_t j = 0;
#if defined(FASTGNL_AVX512)
    for (; j + LANES <= count; j += LANES)
        store(to + j, _mm512_cvtps_ph((__m512)row(from + j), _MM_FROUND_TO_NEAREST_INT));
#elif defined(FASTGNL_AVX2)
    for (; j + LANES <= count; j += LANES)
        store(to + j, _mm256_cvtps_ph((__m256)row(from + j), _MM_FROUND_TO_NEAREST_INT));
#endif
    for (; j < count; ++j) to[j] = to_half(from[j]);
}

inline int64_t padded(int64_t count) { return (count + LANES - 1) / LANES * LANES; }
inline int64_t bytes_of(int64_t dtype) { return dtype == FLOAT32 ? 4 : 2; }
inline bool is_plain(int64_t dtype, int64_t count) { return dtype == FLOAT32 && count % LANES == 0; }

template <class T>
inline T* at(T* base, int64_t element, int64_t dtype) {
    using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
    return static_cast<Byte*>(base) + element * bytes_of(dtype);
}

// The last, partial vector of a row. A copy through memory would stall: the load waits for several stores to retire.
inline F load_tail(const float* from, int64_t count, float padding) {
    const I there = lane_numbers() < all((int32_t)count);
#if defined(FASTGNL_AVX512)
    const F v = (F)_mm512_maskz_loadu_ps((__mmask16)lane_bits(there), from);
#elif defined(FASTGNL_AVX2)
    const F v = (F)_mm256_maskload_ps(from, (__m256i)there);
#else
    F v = {};
    for (int64_t lane = 0; lane < count; ++lane) v[lane] = from[lane];
#endif
    return there ? v : all(padding);
}

// A row as float32 in whole vectors: where it lies if it is that already, else a padded copy.
inline const float* wide_row(const void* from, int64_t dtype, int64_t count, float padding, float* copy) {
    if (is_plain(dtype, count)) return static_cast<const float*>(from);
    const int64_t whole = count - count % LANES;
    if (dtype == FLOAT32) {
        const float* const wide = static_cast<const float*>(from);
        for (int64_t j = 0; j < whole; j += LANES) store(copy + j, row(wide + j));
        store(copy + whole, load_tail(wide + whole, count - whole, padding));
        return copy;
    }
    const uint16_t* narrow = static_cast<const uint16_t*>(from);
    if (whole < count) store(copy + whole, all(padding));
    if (dtype == FLOAT16) widen_halves(narrow, count, copy);
    if (dtype == BFLOAT16)
        for (int64_t j = 0; j < count; ++j) copy[j] = from_bfloat(narrow[j]);
    return copy;
}

inline void store_row(const float* from, int64_t dtype, int64_t count, void* to) {
    uint16_t* narrow = static_cast<uint16_t*>(to);
    if (dtype == FLOAT32 && from != to) {
        float* const wide = static_cast<float*>(to);
        const int64_t whole = count - count % LANES;
        for (int64_t j = 0; j < whole; j += LANES) store(wide + j, row(from + j));
        for (int64_t j = whole; j < count; ++j) wide[j] = from[j];
    }
    if (dtype == FLOAT16) narrow_to_halves(from, count, narrow);
    if (dtype == BFLOAT16)
        for (int64_t j = 0; j < count; ++j) narrow[j] = to_bfloat(from[j]);
}

// ---------------------------------------------------------------------------------------------------------------
// Philox-4x32-10. A 64-bit lane holds one counter's word in its low half; the multiplication ignores the high one.

constexpr uint32_t MULTIPLIER_0 = 0xD2511F53, MULTIPLIER_1 = 0xCD9E8D57;
constexpr int ROUNDS = 10;
constexpr int QUADS = LANES / 2;                 // counters in a vector
constexpr int BLOCK = 32;                        // classes drawn at once: one word of the set's bits
constexpr int VECTORS = BLOCK / LANES;           // vectors of words in a block
constexpr int GROUPS = BLOCK / (4 * QUADS);      // independent counter vectors in a block

inline uint32_t high_half(uint64_t x) { return (uint32_t)(x >> 32); }

inline W multiply(W a, uint32_t by) {
#if defined(FASTGNL_AVX512)
    return (W)_mm512_mul_epu32((__m512i)a, _mm512_set1_epi64(by));
#elif defined(FASTGNL_AVX2)
    return (W)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi64x(by));
#elif defined(__SSE2__)
    return (W)_mm_mul_epu32((__m128i)a, _mm_set1_epi64x(by));
#elif defined(__ARM_NEON)
    return (W)vmull_n_u32(vmovn_u64((uint64x2_t)a), by);
#else
    return (a & 0xFFFFFFFFu) * by;
#endif
}

// Output words (c0, c1, c2, c3) of each counter -> two vectors in class order, given the lane order of `quads`.
inline void interleave(W c0, W c1, W c2, W c3, U* out) {
#if defined(FASTGNL_AVX2)
    const __m256i a = _mm256_blend_epi32((__m256i)c0, (__m256i)(c1 << 32), 0xAA);
    const __m256i b = _mm256_blend_epi32((__m256i)c2, (__m256i)(c3 << 32), 0xAA);
    out[0] = (U)_mm256_unpacklo_epi64(a, b);
    out[1] = (U)_mm256_unpackhi_epi64(a, b);
#else
    const W a = (c0 & 0xFFFFFFFFu) | (c1 << 32), b = (c2 & 0xFFFFFFFFu) | (c3 << 32);
#if defined(FASTGNL_AVX512)
    out[0] = (U)_mm512_unpacklo_epi64((__m512i)a, (__m512i)b);
    out[1] = (U)_mm512_unpackhi_epi64((__m512i)a, (__m512i)b);
#else
    out[0] = (U)W{a[0], b[0]};
    out[1] = (U)W{a[1], b[1]};
#endif
#endif
}

// class // 4 of each lane: even lanes hold the first vector's quads, odd lanes the second's.
inline W quads(uint64_t first) {
    W order;
    for (int lane = 0; lane < QUADS; ++lane) order[lane] = (uint64_t)((lane % 2) * (QUADS / 2) + lane / 2);
    return order + all(first);
}

struct Keys {
    uint32_t k0[ROUNDS], k1[ROUNDS];
    W wide0[ROUNDS], wide1[ROUNDS];

    explicit Keys(uint64_t seed) {
        for (uint32_t r = 0; r < ROUNDS; ++r) {
            k0[r] = (uint32_t)seed + r * 0x9E3779B9u;
            k1[r] = high_half(seed) + r * 0xBB67AE85u;
            wide0[r] = all((uint64_t)k0[r]);
            wide1[r] = all((uint64_t)k1[r]);
        }
    }
};

// What the first rounds make of the counter words that all classes of a row share.
struct Prefix {
    W round0, round1, round2, round2_other, round3;

    Prefix(const Keys& keys, int64_t id, int64_t step, uint32_t stream) {
        const uint64_t a_id = (uint64_t)id * MULTIPLIER_0, a_step = (uint64_t)step * MULTIPLIER_1;
        const uint32_t a2 = high_half(a_id) ^ stream ^ keys.k1[0];
        const uint64_t b = (uint64_t)a2 * MULTIPLIER_1;
        const uint64_t c = (uint64_t)(high_half(b) ^ (uint32_t)a_step ^ keys.k0[1]) * MULTIPLIER_0;
        round0 = all((uint64_t)(high_half(a_step) ^ keys.k0[0]));
        round1 = all((uint64_t)((uint32_t)a_id ^ keys.k1[1]));
        round2 = all((uint64_t)((uint32_t)b ^ keys.k0[2]));
        round2_other = all((uint64_t)(high_half(c) ^ keys.k1[2]));
        round3 = all((uint64_t)((uint32_t)c ^ keys.k1[3]));
    }
};

// The words of several vectors of counters at once, so that one's multiplications hide another's.
template <int COUNT>
ALWAYS_INLINE void draw(const Keys& keys, const Prefix* const (&prefix)[COUNT], const W (&quad)[COUNT], U* out) {
    W c0[COUNT], c1[COUNT], c2[COUNT], c3[COUNT];
    for (int g = 0; g < COUNT; ++g) {
        const W a = multiply(quad[g] ^ prefix[g]->round0, MULTIPLIER_0);
        const W b = multiply((a >> 32) ^ prefix[g]->round1, MULTIPLIER_1);
        const W c = multiply((b >> 32) ^ prefix[g]->round2, MULTIPLIER_0);
        const W d = multiply(a ^ prefix[g]->round2_other, MULTIPLIER_1);
        c0[g] = (d >> 32) ^ (b ^ keys.wide0[3]);
        c1[g] = d;
        c2[g] = (c >> 32) ^ prefix[g]->round3;
        c3[g] = c;
    }
    for (int r = 4; r < ROUNDS; ++r)
        for (int g = 0; g < COUNT; ++g) {
            const W a = multiply(c0[g], MULTIPLIER_0), b = multiply(c2[g], MULTIPLIER_1);
            c0[g] = (b >> 32) ^ (c1[g] ^ keys.wide0[r]);
            c1[g] = b;
            c2[g] = (a >> 32) ^ (c3[g] ^ keys.wide1[r]);
            c3[g] = a;
        }
    for (int g = 0; g < COUNT; ++g) interleave(c0[g], c1[g], c2[g], c3[g], out + 2 * g);
}

// The words of the 32 classes from `first` on.
inline void draw_block(const Keys& keys, const Prefix& prefix, int64_t first, U (&out)[VECTORS]) {
    const Prefix* which[GROUPS];
    W quad[GROUPS];
    for (int g = 0; g < GROUPS; ++g) {
        which[g] = &prefix;
        quad[g] = quads((uint64_t)first / 4 + (uint64_t)(g * QUADS));
    }
    draw<GROUPS>(keys, which, quad, out);
}

// Philox(id, 0, step, stream)[0], the word of class 0.
inline uint32_t first_word(const Keys& keys, int64_t id, int64_t step, uint32_t stream) {
    uint64_t c0 = (uint64_t)id, c2 = (uint64_t)step;
    uint32_t c1 = 0, c3 = stream;
    for (int r = 0; r < ROUNDS; ++r) {
        const uint64_t a = c0 * MULTIPLIER_0, b = c2 * MULTIPLIER_1;
        c0 = high_half(b) ^ c1 ^ keys.k0[r];
        c1 = (uint32_t)b;
        c2 = high_half(a) ^ c3 ^ keys.k1[r];
        c3 = (uint32_t)a;
    }
    return (uint32_t)c0;
}

// -log u, u = (2 (word >> 9) + 1) / 2**24, in the steps of philox.exponential: not one may be fused or reordered.
inline F exponential(U words) {
    const I bits = (I)__builtin_convertvector((I)(words >> 9) * 2 + 1, F);
    const F mantissa = (F)((bits & 0x7FFFFF) | 0x3F800000);
    const I high = mantissa > all(1.4142135f);
    const F exponent = __builtin_convertvector((bits >> 23) - (127 + 24) - high, F);
    const F f = high ? mantissa * all(0.5f) : mantissa;
    const F s = (f - all(1.0f)) / (f + all(1.0f));
    const F s2 = s * s;
    F series = s2 * all((float)(1.0 / 9.0));
    series = s2 * (series + all((float)(1.0 / 7.0)));
    series = s2 * (series + all((float)(1.0 / 5.0)));
    series = s2 * (series + all((float)(1.0 / 3.0)));
    return -(exponent * all(0.6931472f) + all(2.0f) * s * (series + all(1.0f)));
}

// ---------------------------------------------------------------------------------------------------------------
// Coverage labels.

template <bool SQUARE>
inline F race_weight(F table, int64_t power) {
    if (SQUARE) return table * table;
    F weight = table;
    for (int64_t i = 1; i < power; ++i) weight = weight * table;
    return weight;
}

// argmin_j E_j / weight_j, the first of equals.
struct Race {
    F best = all(std::numeric_limits<float>::infinity());
    F where = {};  // the class, exact in float32 below 2**24

    void enter(U words, F weight, F classes) {
        const F time = exponential(words) / weight;
        const I wins = time < best;
        best = wins ? time : best;
        where = wins ? classes : where;
    }

    int64_t winner() const {
        const float infinity = std::numeric_limits<float>::infinity();
        const float first = minimum(best == all(minimum(best)) ? where : all(infinity));
        return first < infinity ? (int64_t)first : 0;
    }
};

// E >= 1 - u >= (~word >> 8) / 2**24, so a class may only win where that is below best * weight.
// The margin of 1e-4 is far above every rounding in between.
inline I may_win(U words, F weight, float bound) {
    return __builtin_convertvector((I)(~words >> 8), F) < all(bound) * weight;
}

template <bool SQUARE>
inline bool any_may_win(const U (&words)[VECTORS], const float* table, int64_t power, float bound) {
    I any = {};
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; ++v)
        any |= may_win(words[v], race_weight<SQUARE>(row(table + v * LANES), power), bound);
    return lane_bits(any);
}

inline float bound_of(const Race& race) { return minimum(race.best) * (16777216.0f * 1.0001f); }

// Memory that the row will want once its words are drawn; drawing leaves the memory idle.
struct Ahead {
    const void* rows[4];

    void fetch(int64_t first) const {
        for (const void* from : rows) {
            __builtin_prefetch(static_cast<const float*>(from) + first);
            __builtin_prefetch(static_cast<const float*>(from) + first + 16);
        }
    }
};

template <bool SQUARE>
inline int64_t sampled_label(const Keys& keys, const Prefix& prefix, const float* table, int64_t C, int64_t power,
                             const Ahead& ahead) {
    const int64_t end = padded(C);
    float last[BLOCK] = {};
    std::copy(table + (end - 1) / BLOCK * BLOCK, table + end, last);
    Race race;
    float bound = std::numeric_limits<float>::infinity();
    for (int64_t first = 0; first < end; first += BLOCK) {
        ahead.fetch(first);
        const float* const from = first + BLOCK <= end ? table + first : last;
        U words[VECTORS];
        draw_block(keys, prefix, first, words);
        if (!any_may_win<SQUARE>(words, from, power, bound)) continue;
        for (int v = 0; v < VECTORS; ++v) {
            const F weight = race_weight<SQUARE>(row(from + v * LANES), power);
            const I classes = lane_numbers() + (int32_t)(first + v * LANES);
            if (lane_bits(may_win(words[v], weight, bound)))
                race.enter(words[v], weight, __builtin_convertvector(classes, F));
        }
        bound = bound_of(race);
    }
    return race.winner();
}

inline int64_t largest_label(const float* table, int64_t C) {
    return std::max_element(table, table + C) - table;
}

// ---------------------------------------------------------------------------------------------------------------
// Random classes: the k free classes with the smallest (word, class). Words are kept with their top bit flipped,
// so that signed comparisons order them; classes that are not free hold the largest.

constexpr int32_t TAKEN = std::numeric_limits<int32_t>::max();

inline int64_t count_up_to(const int32_t* keys, int64_t end, int32_t threshold) {
    I a = {}, b = {};
    int64_t j = 0;
    for (; j + 2 * LANES <= end; j += 2 * LANES) {
        a -= load<I>(keys + j) <= all(threshold);
        b -= load<I>(keys + j + LANES) <= all(threshold);
    }
    if (j < end) a -= load<I>(keys + j) <= all(threshold);
    return sum(a + b);
}

inline void mark_up_to(const int32_t* keys, int64_t end, int32_t threshold, uint32_t* bits) {
    for (int64_t first = 0; first < end; first += BLOCK) {
        uint32_t word = 0;
        for (int v = 0; v < VECTORS && first + v * LANES < end; ++v)
            word |= lane_bits(load<I>(keys + first + v * LANES) <= all(threshold)) << (v * LANES);
        bits[first / BLOCK] = word;
    }
}

inline bool holds(const uint32_t* bits, int64_t j) { return bits[j / 32] >> (j % 32) & 1; }
inline void put(uint32_t* bits, int64_t j) { bits[j / 32] |= 1u << (j % 32); }

// The distinct labels of a row that are in its set by name, and how often each is named.
struct Named {
    int64_t label[3];
    int count[3];
    int distinct = 0;

    void add(int64_t j) {
        for (int i = 0; i < distinct; ++i)
            if (label[i] == j) {
                ++count[i];
                return;
            }
        label[distinct] = j;
        count[distinct++] = 1;
    }

    bool has(int64_t j) const {
        for (int i = 0; i < distinct; ++i)
            if (label[i] == j) return true;
        return false;
    }
};

// Words that tie across the k-th place: the smaller ones are in, and of the equal ones the first classes.
inline void mark_tied(const int32_t* keys, int64_t C, int32_t tie, int64_t k, const Named& named, uint32_t* bits) {
    std::fill(bits, bits + (C + 31) / 32, 0u);
    for (int64_t j = 0; j < C; ++j)
        if (keys[j] < tie) put(bits, j), --k;
    for (int64_t j = 0; j < C && k > 0; ++j)
        if (keys[j] == tie && !named.has(j)) put(bits, j), --k;
}

// 0 < k < free. Looks for a threshold with exactly k keys up to it: the keys are uniform, so the k-th is
// near where interpolation between two counts puts it.
inline void mark_smallest(const int32_t* keys, int64_t C, int64_t k, int64_t free, const Named& named, uint32_t* bits) {
    const int64_t end = padded(C);
    int64_t low = (int64_t)std::numeric_limits<int32_t>::min() - 1, high = TAKEN;
    int64_t count_low = 0, count_high = free;
    for (int tries = 0; high - low > 1; ++tries) {
        // Keys that lie badly for interpolation are halved instead, so that 32 more tries always end it.
        const double part = tries < 12 ? (double)(k - count_low) / (double)(count_high - count_low) : 0.5;
        const int64_t guess = low + (int64_t)(part * (double)(high - low));
        const int64_t middle = std::min(std::max(guess, low + 1), high - 1);
        const int64_t count = count_up_to(keys, end, (int32_t)middle);
        if (count == k) return mark_up_to(keys, end, (int32_t)middle, bits);
        (count < k ? low : high) = middle;
        (count < k ? count_low : count_high) = count;
    }
    mark_tied(keys, C, (int32_t)high, k, named, bits);
}

// ---------------------------------------------------------------------------------------------------------------
// Scratch memory and the loop over rows.

// What a thread needs for one row, and its sums over the rows of a chunk.
struct Scratch {
    float *z, *t, *table, *out, *own_q, *first_sum, *second_sum;
    float* q;  // own_q, or the row of grad_z that keeps q
    int32_t* keys;
    double terms[4];

    explicit Scratch(int64_t C) {
        // Rows a multiple of 4096 bytes apart would share the same few sets of the L1 cache.
        const int64_t width = C <= SMALL ? SMALL * LANES : (C + BLOCK - 1) / BLOCK * BLOCK, stride = width + 48;
        memory.reset(static_cast<float*>(std::aligned_alloc(64, (size_t)(8 * stride * 4 + 63) / 64 * 64)));
        float** const rows[] = {&z, &t, &table, &out, &own_q, &first_sum, &second_sum};
        float* next = memory.get();
        for (float** pointer : rows) {
            *pointer = next;
            next += stride;
        }
        q = own_q;
        keys = reinterpret_cast<int32_t*>(next);
    }

    void clear(int64_t C, bool both) {
        const int64_t end = C <= SMALL ? C * LANES : padded(C);
        std::fill(first_sum, first_sum + end, 0.0f);
        if (both) std::fill(second_sum, second_sum + end, 0.0f);
        std::fill(terms, terms + 4, 0.0);
    }

private:
    struct Free {
        void operator()(float* pointer) const { std::free(pointer); }
    };
    std::unique_ptr<float, Free> memory;
};

// body(scratch, first row, one past the last) for each chunk, then merge(scratch) in the order of the chunks.
template <class Body, class Merge>
void for_chunks(const Step& s, const Body& body, const Merge& merge) {
    const int64_t rows = std::max<int64_t>(16, (s.B + 63) / 64), chunks = (s.B + rows - 1) / rows;
    const bool small = s.B * s.C < 8192;
    const int threads = small ? 1 : (int)std::max<int64_t>(1, std::min(s.threads, chunks));
    if (threads == 1) {
        Scratch scratch(s.C);
        for (int64_t chunk = 0; chunk < chunks; ++chunk) {
            body(scratch, chunk * rows, std::min(s.B, (chunk + 1) * rows));
            merge(scratch);
        }
        return;
    }
#pragma omp parallel num_threads(threads)
    {
        Scratch scratch(s.C);
#pragma omp for ordered schedule(dynamic, 1)
        for (int64_t chunk = 0; chunk < chunks; ++chunk) {
            body(scratch, chunk * rows, std::min(s.B, (chunk + 1) * rows));
#pragma omp ordered
            merge(scratch);
        }
    }
}

inline void add_row(float* to, const float* from, int64_t count) {
    for (int64_t j = 0; j < count; ++j) to[j] += from[j];
}

inline float* stat(const Step& s, Stat which) { return s.stats + which * s.B; }

inline const float* z_row(const Step& s, int64_t i, Scratch& scratch) {
    return wide_row(at(s.z, i * s.z_stride, s.z_dtype), s.z_dtype, s.C, PADDING, scratch.z);
}

// Until its gradient is known, a row of grad_z keeps q: reading it is faster than e^z once more.
inline bool keeps_q(const Step& s) {
    return s.live && s.grad_z && s.z_dtype == FLOAT32 && s.prior_kl != CE && s.C > SMALL;
}

inline const float* kept_q(const Step& s, int64_t i, float* copy) {
    return wide_row(at(s.grad_z, i * s.C, FLOAT32), FLOAT32, s.C, 0.0f, copy);
}

inline const float* next_z(const Step& s, int64_t i) {
    return static_cast<const float*>(at(s.z, std::min(i + 1, s.B - 1) * s.z_stride, s.z_dtype));
}

inline const float* table_row(const Step& s, int64_t i, Scratch& scratch) {
    return wide_row(at(s.M, s.slots[i] * s.C, s.table_dtype), s.table_dtype, s.C, 0.0f, scratch.table);
}

inline F lane_maximum(const float* x, int64_t end) {
    F a = row(x), b = a, c = a, d = a;
    int64_t j = LANES;
    for (; j + 4 * LANES <= end; j += 4 * LANES) {
        a = larger(row(x + j), a);
        b = larger(row(x + j + LANES), b);
        c = larger(row(x + j + 2 * LANES), c);
        d = larger(row(x + j + 3 * LANES), d);
    }
    for (; j < end; j += LANES) a = larger(row(x + j), a);
    return larger(larger(a, b), larger(c, d));
}

inline float row_maximum(const float* x, int64_t end) { return maximum(lane_maximum(x, end)); }

// out = e^(z - shift - log_sum), and its sum over each lane. A loop of its own: the constants take all registers.
// Asks for the next row of z meanwhile: at 1000 classes a row is a page, where the hardware's prefetching ends.
template <int COUNT>
ALWAYS_INLINE F exp_part(const float* z, F shift, F log_sum, float* out) {
    F y[COUNT], total = {};
    for (int v = 0; v < COUNT; ++v) y[v] = row(z + v * LANES) - shift - log_sum;
    exp_negative<COUNT>(y);
    for (int v = 0; v < COUNT; ++v) {
        store(out + v * LANES, y[v]);
        total += y[v];
    }
    return total;
}

NEVER_INLINE F exp_row(const float* z, F shift, F log_sum, int64_t end, float* out, const float* next) {
    constexpr int TOGETHER = 3;
    F total = {};
    int64_t j = 0;
    for (; j + TOGETHER * LANES <= end; j += TOGETHER * LANES) {
        __builtin_prefetch(next + j);
        __builtin_prefetch(next + j + 16);
        total += exp_part<TOGETHER>(z + j, shift, log_sum, out + j);
    }
    for (; j < end; j += LANES) total += exp_part<1>(z + j, shift, log_sum, out + j);
    return total;
}

// m = max z and log sum exp(z - m).
struct Softmax {
    float maximum, log_sum;
};

inline Softmax softmax(const float* z, int64_t end, float* e) {
    const float m = row_maximum(z, end);
    return {m, log_positive(sum(exp_row(z, all(m), F{}, end, e, z)))};
}

// ---------------------------------------------------------------------------------------------------------------
// The denominator.

struct Denominator {
    std::unique_ptr<float[]> inverse, log;  // 1 / D_j and log D_j, padded with 0
    float scale;                            // world / rows of the global batch
    float grad_scale;                       // the same, or HALF_UNITS for gradients in float16

    explicit Denominator(const Step& s) : inverse(new float[(size_t)padded(s.C)]), log(new float[(size_t)padded(s.C)]) {
        const int64_t end = padded(s.C);
        scale = (float)(s.world / (s.live ? (double)s.sums[s.dataset ? 2 * s.C : s.C] : s.rows));
        grad_scale = s.half ? HALF_UNITS : scale;
        for (int64_t j = s.C; j < end; ++j) inverse[(size_t)j] = 1.0f;
        for (int64_t j = 0; j < s.C; ++j) inverse[(size_t)j] = s.D[j];
        for (int64_t j = 0; j < end; j += LANES) {
            const F D = row(inverse.get() + j);
            store(inverse.get() + j, all(1.0f) / D);
            store(log.get() + j, log_positive(D));
        }
        for (int64_t j = s.C; j < end; ++j) inverse[(size_t)j] = log[(size_t)j] = 0.0f;
    }
};

// The table's column sum without this batch's stale rows, or the sum of the window's rows.
inline float detached(const Step& s, int64_t j) {
    if (s.dataset) return std::max(s.column_sum_C[j] - s.sums[s.C + j], 0.0f);
    float window = 0.0f;
    for (int64_t r = 0; r < s.R; ++r) window += s.window_RC[r * s.C + j];
    return window;
}

// D_j = live_j + mix * detached_j, or as given.
inline void write_denominator(const Step& s) {
    for (int64_t j = 0; j < s.C; ++j) {
        const float D = s.live ? s.sums[j] + (float)s.mix * detached(s, j) : s.given_D ? s.given_D[j] : 1.0f;
        s.D[j] = D + TINY;
    }
}

// ---------------------------------------------------------------------------------------------------------------
// Candidate sets and the prior.

inline Named named_labels(const Step& s, int64_t i, int64_t own_label) {
    Named named;
    named.add(s.labels[i]);
    if (s.cover_mode == COVER_GIVEN)
        for (int64_t x = 0; x < s.X; ++x) named.add(s.cover[x * s.B + i]);
    else if (s.cover_mode != COVER_NONE)
        named.add(own_label);
    return named;
}

inline int64_t random_count(const Step& s, const Keys& keys, int64_t i, int64_t step, int64_t free) {
    if (!s.random_labels) return 0;
    if (*s.epoch < s.warmup_epochs) {
        const int64_t most = s.cap < 0 ? s.C - 3 : std::min(s.C - 3, s.cap - 1);
        const uint64_t word = first_word(keys, s.ids[i], step, (uint32_t)(WARMUP + 16 * s.network));
        return std::min(free, (int64_t)((word * (uint64_t)(std::max<int64_t>(most, 0) + 1)) >> 32));
    }
    const int64_t most = s.cap < 0 ? free : std::min(free, s.cap);
    const float k = std::nearbyint(s.w[s.slots[i]] * (float)most);
    return k > 0.0f ? (int64_t)std::min(k, (float)free) : 0;  // false for NaN
}

inline void mark_random(const Step& s, const Keys& keys, const Prefix& prefix, const Named& named, int64_t k,
                        int64_t free, Scratch& scratch, uint32_t* bits) {
    const int64_t words = (s.C + 31) / 32;
    if (k == 0 || k == free) {
        std::fill(bits, bits + words, k ? ~0u : 0u);
        if (k && s.C % 32) bits[words - 1] = (1u << (s.C % 32)) - 1;
        return;
    }
    for (int64_t first = 0; first < s.C; first += BLOCK) {
        U block[VECTORS];
        draw_block(keys, prefix, first, block);
        for (int v = 0; v < VECTORS; ++v) store(scratch.keys + first + v * LANES, block[v] ^ 0x80000000u);
    }
    for (int64_t j = s.C; j < padded(s.C); ++j) scratch.keys[j] = TAKEN;
    for (int n = 0; n < named.distinct; ++n) scratch.keys[named.label[n]] = TAKEN;
    mark_smallest(scratch.keys, s.C, k, free, named, bits);
}

alignas(64) constexpr uint32_t BIT[BLOCK] = {
    1u << 0,  1u << 1,  1u << 2,  1u << 3,  1u << 4,  1u << 5,  1u << 6,  1u << 7,  1u << 8,  1u << 9,  1u << 10,
    1u << 11, 1u << 12, 1u << 13, 1u << 14, 1u << 15, 1u << 16, 1u << 17, 1u << 18, 1u << 19, 1u << 20, 1u << 21,
    1u << 22, 1u << 23, 1u << 24, 1u << 25, 1u << 26, 1u << 27, 1u << 28, 1u << 29, 1u << 30, 1u << 31,
};

struct Masses {
    F p, log_p;
};

// p_ij of a row, read off the bits of its set: 1 / total on members, else the floor. In the additive form one
// label at most is named more than once; it weighs count / total.
struct Prior {
    const uint32_t* bits;
    float member, log_member;
    int64_t repeated = -LANES;
    float p_repeated = 0.0f, log_repeated = 0.0f;

    Prior(const uint32_t* bits, float inverse_total, const Named& named, bool additive)
        : bits(bits), member(inverse_total), log_member(log_positive(inverse_total)) {
        for (int n = 0; additive && n < named.distinct; ++n)
            if (named.count[n] > 1) {
                repeated = named.label[n];
                p_repeated = (float)named.count[n] * inverse_total;
                log_repeated = log_positive(p_repeated);
            }
    }

    Masses at(int64_t j) const {
        const I absent = (all(bits[j / BLOCK]) & load<U>(BIT + j % BLOCK)) == U{};
        Masses masses = {absent ? all(FLOOR) : all(member), absent ? all(LOG_FLOOR) : all(log_member)};
        if (__builtin_expect((uint64_t)(repeated - j) < (uint64_t)LANES, 0)) {
            const I here = lane_numbers() == all((int32_t)(repeated - j));
            masses = {here ? all(p_repeated) : masses.p, here ? all(log_repeated) : masses.log_p};
        }
        return masses;
    }
};

// ---------------------------------------------------------------------------------------------------------------
// Loss terms and gradients of a row.

struct CleanSums {
    float qx, q_log_p;     // sum_j q (z - max), sum_j q log p
    float clipped;         // sum_j clip(q)
    float Z, mean_g;       // sum_j a, and sum_j r g (reverse) or sum_j q g (forward)
    float px, p;           // sum_j p (z - max), sum_j p (ce)
};

// With g = log p - log D and a = p q / D. Leaves q in scratch.
template <int KL>
inline CleanSums clean_sums(const Step& s, const Denominator& D, Prior prior, const float* z, Softmax soft, int64_t i,
                            Scratch& scratch) {
    const int64_t end = padded(s.C);
    const float *const inverse_D = D.inverse.get(), *const log_D = D.log.get();
    if (keeps_q(s))
        scratch.q = const_cast<float*>(kept_q(s, i, scratch.own_q));
    else
        exp_row(z, all(soft.maximum), all(soft.log_sum), end, scratch.q, z);
    const float* const q_row = scratch.q;
    F qx = {}, q_log_p = {}, above = {}, Z = {}, weighted_g = {}, px = {}, total_p = {};
    for (int64_t j = 0; j < end; j += LANES) {
        const F x = row(z + j) - all(soft.maximum), q = row(q_row + j);
        const Masses prior_j = prior.at(j);
        qx = fma(q, x, qx);
        q_log_p = fma(q, prior_j.log_p, q_log_p);
        above += smaller(larger(q - all(CLIP), F{}), all(1.0f - 2 * CLIP));
        if (KL == CE) {
            const I there = lane_numbers() < all((int32_t)std::min<int64_t>(s.C - j, LANES));
            const F p = there ? prior_j.p : F{};
            px = fma(p, x, px);
            total_p += p;
        } else {
            const F a = prior_j.p * smaller(q * row(inverse_D + j), all(LARGEST_RATIO));
            Z += a;
            weighted_g = fma(KL == REVERSE ? a : q, prior_j.log_p - row(log_D + j), weighted_g);
        }
    }
    CleanSums sums = {};
    sums.qx = sum(qx);
    sums.q_log_p = sum(q_log_p);
    // The excess over CLIP is what is added up: thousands of CLIPs in one float32 sum would round the same way.
    sums.clipped = sum(above) + (float)s.C * CLIP;
    if (KL == CE) {
        sums.px = sum(px);
        sums.p = sum(total_p);
    } else {
        sums.Z = sum(Z);
        sums.mean_g = KL == REVERSE ? sum(weighted_g) / sums.Z : sum(weighted_g);
    }
    return sums;
}

// KL(r || q) = sum r g - log Z, KL(q || r) = -sum q g + log Z, or -sum p l.
template <int KL>
inline float prior_term(const CleanSums& sums, Softmax soft) {
    if (KL == CE) return soft.log_sum * sums.p - sums.px;
    const float log_Z = log_positive(sums.Z);
    return KL == REVERSE ? sums.mean_g - log_Z : log_Z - sums.mean_g;
}

// Adds V_ij: reverse -r (g - mean g), forward q - r.
template <int KL>
inline void add_through(const Step& s, const Denominator& D, Prior prior, float inverse_Z, float mean_g,
                        Scratch& scratch) {
    const int64_t end = padded(s.C);
    const float *const inverse_D = D.inverse.get(), *const log_D = D.log.get(), *const q_row = scratch.q;
    float* const sum_row = scratch.first_sum;
    for (int64_t j = 0; j < end; j += LANES) {
        const Masses prior_j = prior.at(j);
        const F q = row(q_row + j), g = prior_j.log_p - row(log_D + j);
        const F r = prior_j.p * (q * row(inverse_D + j)) * all(inverse_Z);
        const F sum = row(sum_row + j);
        store(sum_row + j, KL == REVERSE ? fma(r, all(mean_g) - g, sum) : sum + (q - r));
    }
}

// A row of an output: where it belongs if it can be written there in whole vectors, else scratch memory.
inline float* out_row(const Step& s, void* to, Scratch& scratch) {
    return is_plain(s.z_dtype, s.C) ? static_cast<float*>(to) : scratch.out;
}

// What the prior term's gradient needs of a row besides q and p.
struct PriorParts {
    float inverse_Z, mean_g, total_p;
};

// sum_j U: reverse -1, forward 1 - sum q g, ce -sum p.
template <int KL>
inline float sum_direct(PriorParts parts) {
    return KL == REVERSE ? -1.0f : KL == FORWARD ? 1.0f - parts.mean_g : -parts.total_p;
}

// dL/dz_i = scale (A_i - q_i sum_j A_ij), A = U + (q / D) sum_k V_k: U = r (g - mean g - 1), -q g + r, or -p.
// `through` is the sum of V, or null for a detached denominator. q and `to` may be the same row.
template <int KL>
inline void write_grad_z(const Step& s, const Denominator& D, Prior prior, PriorParts parts, float total_A,
                         const float* through, const float* q_row, float* to) {
    const F scale = all(D.grad_scale * (float)s.weight_prior);
    const int64_t end = padded(s.C);
    const float *const inverse_D = D.inverse.get(), *const log_D = D.log.get();
    for (int64_t j = 0; j < end; j += LANES) {
        const Masses prior_j = prior.at(j);
        const F q = row(q_row + j), p = prior_j.p;
        F A = -p;
        if (KL != CE) {
            const F ratio = smaller(q * row(inverse_D + j), all(LARGEST_RATIO));
            const F r = p * ratio * all(parts.inverse_Z), g = prior_j.log_p - row(log_D + j);
            A = KL == REVERSE ? r * (g - all(parts.mean_g + 1.0f)) : r - q * g;
            if (through) A = fma(ratio, row(through + j), A);
        }
        store(to + j, scale * fma(q, all(-total_A), A));
    }
}

struct NoisyTerms {
    float ce, estep;
};

// L_CE = -log f[y] and L_KL = KL(q || h), h = f p / sum f p (y->x) or f, means over the draws; and
// dL/dt = (f - onehot(y) + h - q) / K with the terms' weights.
inline NoisyTerms noisy_terms(const Step& s, Prior prior, const CleanSums& clean, Softmax soft, float scale,
                              int64_t i, Scratch& scratch) {
    const int64_t end = padded(s.C), y = s.labels[i];
    const float weight_ce = scale * (float)s.weight_ce / (float)s.K;
    const float weight_estep = scale * (float)s.weight_estep / (float)s.K;
    const float* const q_row = scratch.q;
    NoisyTerms terms = {};
    for (int64_t k = 0; k < s.K; ++k) {
        const void* from = at(s.t, i * s.t_stride_b + k * s.t_stride_k, s.z_dtype);
        const float* t = wide_row(from, s.z_dtype, s.C, PADDING, scratch.t);
        void* const to = s.grad_t ? at(s.grad_t, (i * s.K + k) * s.C, s.z_dtype) : scratch.out;
        float* const out = s.grad_t ? out_row(s, to, scratch) : scratch.out;  // first holds exp(t - max)
        const float m = row_maximum(t, end);
        const float sum_f = sum(exp_row(t, all(m), F{}, end, out, t)), log_f = log_positive(sum_f);
        F total_p = {}, qx = {};
        for (int64_t j = 0; j < end; j += LANES) {
            total_p = fma(row(out + j), prior.at(j).p, total_p);
            qx = fma(row(q_row + j), row(t + j) - all(m), qx);
        }
        const float sum_fp = sum(total_p);
        terms.ce += log_f - (t[y] - m);
        // sum_j q (l - log h), the two logs' constants taken out of the sum.
        const float cross = clean.qx - soft.log_sum - sum(qx);
        terms.estep += s.direction == Y_TO_X ? cross - clean.q_log_p + log_positive(sum_fp) : cross + log_f;
        if (!s.grad_t) continue;
        const bool with_prior = s.direction == Y_TO_X;
        const F of_f = all((weight_ce + (with_prior ? 0.0f : weight_estep)) / sum_f);
        const F of_fp = all(with_prior ? weight_estep / sum_fp : 0.0f);
        for (int64_t j = 0; j < end; j += LANES) {
            const F e_weight = fma(of_fp, prior.at(j).p, of_f);
            store(out + j, fma(row(q_row + j), all(-weight_estep), row(out + j) * e_weight));
        }
        out[y] -= weight_ce;
        store_row(out, s.z_dtype, s.C, to);
    }
    return {terms.ce / (float)s.K, terms.estep / (float)s.K};
}

// False where a row's logits are not finite: its sample's row of M and loss_N are then left as they were.
inline bool is_sound(float sample_loss) { return std::isfinite(sample_loss); }

// M_i <- beta M_i + (1 - beta) clip(q_i) / sum_j clip(q_ij), and what that adds to the column sums.
inline void update_table(const Step& s, const float* table, float clipped, int64_t slot, Scratch& scratch) {
    const int64_t end = padded(s.C);
    void* const to = at(s.M, slot * s.C, s.table_dtype);
    float* const fresh = is_plain(s.table_dtype, s.C) && !s.dataset ? static_cast<float*>(to) : scratch.out;
    const F keep = all((float)s.beta), take = all((float)(1.0 - s.beta) / clipped);
    const float* const q_row = scratch.q;
    for (int64_t j = 0; j < end; j += LANES) {
        const F q = smaller(larger(row(q_row + j), all(CLIP)), all(1.0f - CLIP));
        store(fresh + j, fma(q, take, keep * row(table + j)));
    }
    if (!s.dataset) return store_row(fresh, s.table_dtype, s.C, to);
    if (s.table_dtype != FLOAT32) {
        store_row(fresh, s.table_dtype, s.C, to);
        wide_row(to, s.table_dtype, s.C, 0.0f, fresh);
    }
    for (int64_t j = 0; j < s.C; ++j) scratch.second_sum[j] += fresh[j] - table[j];
    if (s.table_dtype == FLOAT32) store_row(fresh, s.table_dtype, s.C, to);
}

// ---------------------------------------------------------------------------------------------------------------
// The phases.

inline int32_t kept_label(float kept) {
    int32_t label;
    std::memcpy(&label, &kept, 4);
    return label;
}

inline void keep_label(float* where, int64_t label) {
    const int32_t narrow = (int32_t)label;
    std::memcpy(where, &narrow, 4);
}

inline void prefetch_rows(const Step& s, int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
        __builtin_prefetch(at(s.M, s.slots[i] * s.C, s.table_dtype));
        __builtin_prefetch(s.loss_N + s.slots[i], 1);
        if (*s.epoch >= s.warmup_epochs) __builtin_prefetch(s.w + s.slots[i]);
    }
}

inline Softmax kept_softmax(const Step& s, int64_t i) {
    return {stat(s, MAXIMUM)[i], stat(s, LOG_SUM)[i]};
}

inline void sum_row(const Step& s, int64_t i, Scratch& scratch) {
    const int64_t end = padded(s.C);
    const float* const z = z_row(s, i, scratch);
    const float m = row_maximum(z, end);
    const float total = sum(exp_row(z, all(m), F{}, end, scratch.q, next_z(s, i)));
    stat(s, MAXIMUM)[i] = m;
    stat(s, LOG_SUM)[i] = log_positive(total);
    const F inverse = all(1.0f / total);
    const float* const e_row = scratch.q;
    float* const sum_row = scratch.first_sum;
    void* const kept = keeps_q(s) ? at(s.grad_z, i * s.C, FLOAT32) : nullptr;
    float* const q_row = kept && is_plain(FLOAT32, s.C) ? static_cast<float*>(kept) : scratch.q;
    for (int64_t j = 0; j < end; j += LANES) {
        const F q = row(e_row + j) * inverse;
        store(q_row + j, q);
        store(sum_row + j, row(sum_row + j) + q);
    }
    if (kept && q_row != kept) store_row(q_row, FLOAT32, s.C, kept);
    if (s.dataset) add_row(scratch.second_sum, table_row(s, i, scratch), s.C);
}

inline Ahead ahead_of(const Step& s, int64_t i) {
    const void* const out = s.grad_t ? s.grad_t : s.t;
    return {{at(s.z, i * s.z_stride, s.z_dtype), at(s.t, i * s.t_stride_b, s.z_dtype),
             at(out, i * (s.grad_t ? s.K * s.C : s.t_stride_b), s.z_dtype),
             at(static_cast<const void*>(s.M), s.slots[std::min(i + 1, s.B - 1)] * s.C, s.table_dtype)}};
}

inline uint32_t* bits_of(const Step& s, int64_t i) { return s.bits + i * ((s.C + 31) / 32); }

// Draws the set of row i and keeps what its prior is made of.
inline Prior draw_set(const Step& s, const Keys& keys, int64_t step, int64_t i, const float* table, Scratch& scratch) {
    const int64_t id = s.ids[i];
    const uint32_t stream = (uint32_t)(16 * s.network);
    const Prefix cover(keys, id, step, COVERAGE + stream), free_words(keys, id, step, FREE + stream);
    int64_t label = 0;
    if (s.cover_mode == COVER_ARGMAX) label = largest_label(table, s.C);
    if (s.cover_mode == COVER_SAMPLE)
        label = s.power == 2 ? sampled_label<true>(keys, cover, table, s.C, s.power, ahead_of(s, i))
                             : sampled_label<false>(keys, cover, table, s.C, s.power, ahead_of(s, i));
    const Named named = named_labels(s, i, label);
    const int64_t free = s.C - named.distinct, k = random_count(s, keys, i, step, free);
    uint32_t* const bits = bits_of(s, i);
    mark_random(s, keys, free_words, named, k, free, scratch, bits);
    int64_t total = k;
    for (int n = 0; n < named.distinct; ++n) {
        put(bits, named.label[n]);
        total += s.additive ? named.count[n] : 1;
    }
    s.set_size[i] = named.distinct + k;
    if (s.covered && s.clean) s.covered[i] = holds(bits, s.clean[i]);
    stat(s, INVERSE_TOTAL)[i] = 1.0f / (float)total;
    keep_label(stat(s, OWN_COVER) + i, label);
    return Prior(bits, 1.0f / (float)total, named, s.additive);
}

inline Prior kept_prior(const Step& s, int64_t i) {
    const Named named = named_labels(s, i, kept_label(stat(s, OWN_COVER)[i]));
    return Prior(bits_of(s, i), stat(s, INVERSE_TOTAL)[i], named, s.additive);
}

template <int KL>
inline void step_row(const Step& s, const Keys& keys, const Denominator& D, int64_t step, int64_t i, Scratch& scratch) {
    const int64_t end = padded(s.C), slot = s.slots[i], y = s.labels[i];
    const float* table = table_row(s, i, scratch);
    const Prior prior = draw_set(s, keys, step, i, table, scratch);
    const float* z = z_row(s, i, scratch);
    const Softmax soft = s.live ? kept_softmax(s, i) : softmax(z, end, scratch.q);
    const CleanSums sums = clean_sums<KL>(s, D, prior, z, soft, i, scratch);
    const float prior_loss = prior_term<KL>(sums, soft), sample_loss = soft.log_sum - (z[y] - soft.maximum);
    const PriorParts parts = {KL == CE ? 0.0f : 1.0f / sums.Z, sums.mean_g, sums.p};
    const NoisyTerms noisy = noisy_terms(s, prior, sums, soft, D.grad_scale, i, scratch);
    stat(s, INVERSE_Z)[i] = parts.inverse_Z;
    stat(s, MEAN_G)[i] = parts.mean_g;
    if (s.live && KL != CE) add_through<KL>(s, D, prior, parts.inverse_Z, parts.mean_g, scratch);
    if (s.grad_z && (!s.live || KL == CE)) {
        void* const to = at(s.grad_z, i * s.C, s.z_dtype);
        float* const out = out_row(s, to, scratch);
        write_grad_z<KL>(s, D, prior, parts, sum_direct<KL>(parts), nullptr, scratch.q, out);
        store_row(out, s.z_dtype, s.C, to);
    }
    s.sample_loss[i] = sample_loss;
    if (s.update && is_sound(sample_loss)) {
        update_table(s, table, sums.clipped, slot, scratch);
        s.loss_N[slot] = sample_loss;
    }
    scratch.terms[0] += s.weight_ce * noisy.ce + s.weight_prior * prior_loss + s.weight_estep * noisy.estep;
    scratch.terms[1] += noisy.ce;
    scratch.terms[2] += prior_loss;
    scratch.terms[3] += noisy.estep;
}

// ---------------------------------------------------------------------------------------------------------------
// Up to 32 classes: a lane is a row and a vector holds one class of LANES rows, so that nothing is summed across
// lanes and no lane is idle. The same steps as above; arrays are [C][LANES].

// The rows a vector holds; lanes beyond the chunk's last row repeat it and are left out of every sum.
struct LaneRows {
    int64_t first, count;
    I there;

    LaneRows(int64_t first, int64_t last)
        : first(first), count(std::min<int64_t>(LANES, last - first)), there(lane_numbers() < all((int32_t)count)) {}

    int64_t operator[](int lane) const { return first + std::min<int64_t>(lane, count - 1); }
    F only(F v) const { return there ? v : F{}; }

    template <class T>
    F gather(const T* from) const {
        F v;
        for (int lane = 0; lane < LANES; ++lane) v[lane] = (float)from[(*this)[lane]];
        return v;
    }

    void scatter(F v, float* to) const {
        for (int lane = 0; lane < count; ++lane) to[first + lane] = v[lane];
    }
};

// A 4 x 4 block, transposed.
inline void transpose(const float* const (&from)[4], float* const (&to)[4]) {
    F4 a = load<F4>(from[0]), b = load<F4>(from[1]), c = load<F4>(from[2]), d = load<F4>(from[3]);
#if defined(__SSE2__)
    _MM_TRANSPOSE4_PS(a, b, c, d);
#else
    const F4 rows[4] = {a, b, c, d};
    for (int n = 0; n < 4; ++n) {
        a[n] = rows[n][0];
        b[n] = rows[n][1];
        c[n] = rows[n][2];
        d[n] = rows[n][3];
    }
#endif
    store(to[0], a);
    store(to[1], b);
    store(to[2], c);
    store(to[3], d);
}

// Four lanes between rows in memory and columns, four classes at a time; the last four may overlap those before.
template <class Move>
inline void for_blocks(int64_t C, const Move& move) {
    for (int lane = 0; lane < LANES; lane += 4)
        for (int64_t j = 0; j < C; j += 4) move(lane, std::min(j, C - 4));
}

// Rows of a matrix into columns; `start(row)` is the row's first element.
template <class Start>
NEVER_INLINE void to_columns(const void* base, int64_t dtype, int64_t C, LaneRows rows, const Start& start, float* columns) {
    float copy[LANES][SMALL + LANES];
    const float* line[LANES];
    for (int lane = 0; lane < LANES; ++lane) {
        const void* const from = at(base, start(rows[lane]), dtype);
        line[lane] = dtype == FLOAT32 ? static_cast<const float*>(from) : wide_row(from, dtype, C, 0.0f, copy[lane]);
    }
    if (C >= 4)
        return for_blocks(C, [&](int lane, int64_t j) {
            float* const to = columns + j * LANES + lane;
            transpose({line[lane] + j, line[lane + 1] + j, line[lane + 2] + j, line[lane + 3] + j},
                      {to, to + LANES, to + 2 * LANES, to + 3 * LANES});
        });
    for (int lane = 0; lane < LANES; ++lane)
        for (int64_t j = 0; j < C; ++j) columns[j * LANES + lane] = line[lane][j];
}

template <class Start>
inline void to_rows(const float* columns, int64_t dtype, int64_t C, LaneRows rows, const Start& start, void* base) {
    float copy[LANES][SMALL];
    float* line[LANES];
    for (int lane = 0; lane < LANES; ++lane) {
        const bool direct = dtype == FLOAT32 && lane < rows.count;
        line[lane] = direct ? static_cast<float*>(at(base, start(rows[lane]), dtype)) : copy[lane];
    }
    if (C >= 4)
        for_blocks(C, [&](int lane, int64_t j) {
            const float* const from = columns + j * LANES + lane;
            transpose({from, from + LANES, from + 2 * LANES, from + 3 * LANES},
                      {line[lane] + j, line[lane + 1] + j, line[lane + 2] + j, line[lane + 3] + j});
        });
    else
        for (int lane = 0; lane < LANES; ++lane)
            for (int64_t j = 0; j < C; ++j) line[lane][j] = columns[j * LANES + lane];
    for (int lane = 0; dtype != FLOAT32 && lane < rows.count; ++lane)
        store_row(copy[lane], dtype, C, at(base, start(rows[lane]), dtype));
}

// Sums of the lanes, from [C][LANES] to [C] in place.
inline void fold_lanes(int64_t C, Scratch& scratch) {
    for (int64_t j = 0; j < C; ++j) {
        scratch.first_sum[j] = sum(row(scratch.first_sum + j * LANES));
        scratch.second_sum[j] = sum(row(scratch.second_sum + j * LANES));
    }
}

// Even and odd rows of a vector, as Philox multiplies them.
struct Halves {
    W even, odd;
};

inline U join(Halves words) {
#if defined(FASTGNL_AVX2)
    return (U)_mm256_blend_epi32((__m256i)words.even, (__m256i)(words.odd << 32), 0xAA);
#else
    return (U)((words.even & 0xFFFFFFFFu) | (words.odd << 32));
#endif
}

// id * MULTIPLIER_0 of each row: the first round's product, whole, as ids may have more than 32 bits.
inline Halves id_products(const Step& s, LaneRows rows) {
    Halves products;
    for (int lane = 0; lane < QUADS; ++lane) {
        products.even[lane] = (uint64_t)s.ids[rows[2 * lane]] * MULTIPLIER_0;
        products.odd[lane] = (uint64_t)s.ids[rows[2 * lane + 1]] * MULTIPLIER_0;
    }
    return products;
}

// Words of the four classes of one quad for COUNT streams.
template <int COUNT>
ALWAYS_INLINE void draw_lanes(const Keys& keys, Halves ids, uint32_t quad, int64_t step,
                              const uint32_t (&stream)[COUNT], Halves (&out)[COUNT][4]) {
    const uint64_t of_step = (uint64_t)step * MULTIPLIER_1;
    const uint64_t of_quad = (uint64_t)(high_half(of_step) ^ quad ^ keys.k0[0]) * MULTIPLIER_0;
    W c0[2 * COUNT], c1[2 * COUNT], c2[2 * COUNT], c3[2 * COUNT];
    for (int n = 0; n < 2 * COUNT; ++n) {
        const W id = n % 2 ? ids.odd : ids.even;
        const W b = multiply((id >> 32) ^ all((uint64_t)(stream[n / 2] ^ keys.k1[0])), MULTIPLIER_1);
        c0[n] = (b >> 32) ^ all((uint64_t)((uint32_t)of_step ^ keys.k0[1]));
        c1[n] = b;
        c2[n] = id ^ all((uint64_t)(high_half(of_quad) ^ keys.k1[1]));
        c3[n] = all(of_quad);
    }
    for (int r = 2; r < ROUNDS; ++r)
        for (int n = 0; n < 2 * COUNT; ++n) {
            const W a = multiply(c0[n], MULTIPLIER_0), b = multiply(c2[n], MULTIPLIER_1);
            c0[n] = (b >> 32) ^ (c1[n] ^ keys.wide0[r]);
            c1[n] = b;
            c2[n] = (a >> 32) ^ (c3[n] ^ keys.wide1[r]);
            c3[n] = a;
        }
    for (int n = 0; n < COUNT; ++n) {
        out[n][0] = {c0[2 * n], c0[2 * n + 1]};
        out[n][1] = {c1[2 * n], c1[2 * n + 1]};
        out[n][2] = {c2[2 * n], c2[2 * n + 1]};
        out[n][3] = {c3[2 * n], c3[2 * n + 1]};
    }
}

// What is known of LANES rows while they are worked on.
struct LaneState {
    alignas(64) float z[SMALL * LANES], q[SMALL * LANES], e[SMALL * LANES], table[SMALL * LANES];
    alignas(64) float p[SMALL * LANES], log_p[SMALL * LANES];
    F y, cover[2];
};

inline F is(F labels, int64_t j, F yes) { return labels == all((float)j) ? yes : F{}; }

// How often class j is named.
inline F named_count(const LaneState& state, int covers, int64_t j) {
    F count = is(state.y, j, all(1.0f));
    for (int x = 0; x < covers; ++x) count += is(state.cover[x], j, all(1.0f));
    return count;
}

inline int cover_count(const Step& s) {
    return s.cover_mode == COVER_GIVEN ? (int)s.X : s.cover_mode == COVER_NONE ? 0 : 1;
}

inline F largest_labels(const Step& s, const float* table) {
    F best = row(table), where = {};
    for (int64_t j = 1; j < s.C; ++j) {
        const F m = row(table + j * LANES);
        where = m > best ? all((float)j) : where;
        best = larger(m, best);
    }
    return where;
}

inline F random_counts(const Step& s, const Keys& keys, Halves ids, int64_t step, LaneRows rows, F free) {
    if (!s.random_labels) return F{};
    if (*s.epoch < s.warmup_epochs) {
        const int64_t most = s.cap < 0 ? s.C - 3 : std::min(s.C - 3, s.cap - 1);
        const uint32_t bound = (uint32_t)std::max<int64_t>(most, 0) + 1;
        const uint32_t stream[1] = {(uint32_t)(WARMUP + 16 * s.network)};
        Halves words[1][4];
        draw_lanes<1>(keys, ids, 0, step, stream, words);
        const Halves below = {multiply(words[0][0].even, bound) >> 32, multiply(words[0][0].odd, bound) >> 32};
        return smaller(__builtin_convertvector((I)join(below), F), free);
    }
    F w;
    for (int lane = 0; lane < LANES; ++lane) w[lane] = s.w[s.slots[rows[lane]]];
    const F most = s.cap < 0 ? free : smaller(free, all((float)s.cap));
    const F k = w * most + all(12582912.0f) - all(12582912.0f);  // to the nearest integer, half to even
    return smaller(larger(k, F{}), free);
}

// Draws the sets: bits, p and log p, and what phase 3 needs of them.
inline void draw_sets(const Step& s, const Keys& keys, int64_t step, LaneRows rows, LaneState& state) {
    const Halves ids = id_products(s, rows);
    const uint32_t network = (uint32_t)(16 * s.network), stream[2] = {COVERAGE + network, FREE + network};
    I key[SMALL];
    Race race;
    for (int64_t first = 0; first < s.C; first += 4) {
        Halves words[2][4];
        draw_lanes<2>(keys, ids, (uint32_t)(first / 4), step, stream, words);
        for (int64_t j = first; j < std::min(first + 4, s.C); ++j) {
            key[j] = (I)(join(words[1][j - first]) ^ 0x80000000u);
            if (s.cover_mode != COVER_SAMPLE) continue;
            const F m = row(state.table + j * LANES);
            const F weight = s.power == 2 ? race_weight<true>(m, 2) : race_weight<false>(m, s.power);
            race.enter(join(words[0][j - first]), weight, all((float)j));
        }
    }
    const int covers = cover_count(s);
    for (int x = 0; x < covers; ++x)
        state.cover[x] = s.cover_mode == COVER_SAMPLE   ? race.where
                         : s.cover_mode == COVER_ARGMAX ? largest_labels(s, state.table)
                                                        : rows.gather(s.cover + x * s.B);
    F count[SMALL], distinct = {};
    I free[SMALL];
    for (int64_t j = 0; j < s.C; ++j) {
        count[j] = named_count(state, covers, j);
        free[j] = count[j] == F{};
        distinct += free[j] ? F{} : all(1.0f);
    }
    const F k = random_counts(s, keys, ids, step, rows, all((float)s.C) - distinct);
    const I k_whole = __builtin_convertvector(k, I);
    F size = {}, total = {};
    U bits = {};
    for (int64_t j = 0; j < s.C; ++j) {
        // (word, class) before this one: of equal words the smaller class comes first.
        I rank = {};
        for (int64_t i = 0; i < j; ++i) rank -= free[i] & ~(key[i] > key[j]);
        for (int64_t i = j + 1; i < s.C; ++i) rank -= free[i] & (key[j] > key[i]);
        count[j] += (free[j] & (rank < k_whole)) ? all(1.0f) : F{};
        const F member = count[j] > F{} ? all(1.0f) : F{};
        size += member;
        bits |= (U)(count[j] > F{}) & (1u << j);
        if (!s.additive) count[j] = member;
        total += count[j];
    }
    for (int64_t j = 0; j < s.C; ++j) {
        const F p = larger(count[j] / total, all(FLOOR));
        store(state.p + j * LANES, p);
        store(state.log_p + j * LANES, log_positive(p));
    }
    rows.scatter(all(1.0f) / total, stat(s, INVERSE_TOTAL));
    for (int lane = 0; lane < rows.count; ++lane) {
        const int64_t i = rows[lane];
        s.bits[i] = bits[lane];
        s.set_size[i] = (int64_t)size[lane];
        if (s.covered && s.clean) s.covered[i] = bits[lane] >> s.clean[i] & 1;
        if (covers) keep_label(stat(s, OWN_COVER) + i, (int64_t)state.cover[0][lane]);
    }
}

// p and log p again from what phase 2 kept.
inline void kept_priors(const Step& s, LaneRows rows, LaneState& state) {
    const int covers = s.additive ? cover_count(s) : 0;
    const F inverse_total = rows.gather(stat(s, INVERSE_TOTAL));
    U bits;
    for (int lane = 0; lane < LANES; ++lane) bits[lane] = s.bits[rows[lane]];
    state.y = rows.gather(s.labels);
    for (int x = 0; x < covers; ++x)
        for (int lane = 0; lane < LANES; ++lane)
            state.cover[x][lane] = s.cover_mode == COVER_GIVEN ? (float)s.cover[x * s.B + rows[lane]]
                                                               : (float)kept_label(stat(s, OWN_COVER)[rows[lane]]);
    const F log_member = log_positive(inverse_total);
    for (int64_t j = 0; j < s.C; ++j) {
        const I absent = (bits & (1u << j)) == U{};
        F p = inverse_total, log_p = log_member;
        if (s.additive) {
            p = p * larger(named_count(state, covers, j), all(1.0f));
            log_p = log_positive(p);
        }
        store(state.p + j * LANES, absent ? all(FLOOR) : p);
        store(state.log_p + j * LANES, absent ? all(LOG_FLOOR) : log_p);
    }
}

inline void load_z(const Step& s, LaneRows rows, LaneState& state) {
    to_columns(s.z, s.z_dtype, s.C, rows, [&](int64_t i) { return i * s.z_stride; }, state.z);
}

inline void load_table(const Step& s, LaneRows rows, float* columns) {
    to_columns(s.M, s.table_dtype, s.C, rows, [&](int64_t i) { return s.slots[i] * s.C; }, columns);
}

inline void sum_lanes(const Step& s, LaneRows rows, Scratch& scratch) {
    LaneState state;
    load_z(s, rows, state);
    const F m = lane_maximum(state.z, s.C * LANES);
    const F total = exp_row(state.z, m, F{}, s.C * LANES, state.e, state.z);
    rows.scatter(m, stat(s, MAXIMUM));
    rows.scatter(log_positive(total), stat(s, LOG_SUM));
    const F inverse = rows.only(all(1.0f) / total);
    float* const sums = scratch.first_sum;
    for (int64_t j = 0; j < s.C * LANES; j += LANES) store(sums + j, fma(row(state.e + j), inverse, row(sums + j)));
    if (!s.dataset) return;
    load_table(s, rows, state.table);
    float* const old = scratch.second_sum;
    for (int64_t j = 0; j < s.C * LANES; j += LANES) store(old + j, row(old + j) + rows.only(row(state.table + j)));
}

struct LaneTerms {
    F ce, prior, estep;
};

struct LaneParts {
    F inverse_Z, mean_g, total_p;
};

// As write_grad_z. Leaves the gradient in e.
template <int KL>
inline void grad_z_lanes(const Step& s, const Denominator& D, LaneParts parts, const float* through, LaneRows rows,
                         LaneState& state) {
    F total_A = KL == REVERSE ? all(-1.0f) : KL == FORWARD ? all(1.0f) - parts.mean_g : -parts.total_p;
    for (int64_t j = 0; through && j < s.C; ++j)
        total_A = fma(row(state.q + j * LANES) * all(D.inverse[(size_t)j]), all(through[j]), total_A);
    const F scale = all(D.grad_scale * (float)s.weight_prior);
    for (int64_t j = 0; j < s.C; ++j) {
        const F q = row(state.q + j * LANES), p = row(state.p + j * LANES);
        F A = -p;
        if (KL != CE) {
            const F ratio = smaller(q * all(D.inverse[(size_t)j]), all(LARGEST_RATIO));
            const F r = p * ratio * parts.inverse_Z, g = row(state.log_p + j * LANES) - all(D.log[(size_t)j]);
            A = KL == REVERSE ? r * (g - parts.mean_g - all(1.0f)) : r - q * g;
            if (through) A = fma(ratio, all(through[j]), A);
        }
        store(state.e + j * LANES, scale * (A - q * total_A));
    }
    to_rows(state.e, s.z_dtype, s.C, rows, [&](int64_t i) { return i * s.C; }, s.grad_z);
}

// L_CE, L_KL and dL/dt, as noisy_terms. `own` is sum_j q l, `own_prior` sum_j q log p.
inline void noisy_lanes(const Step& s, float scale, F own, F own_prior, LaneRows rows, LaneState& state,
                        LaneTerms& terms) {
    const F weight_ce = all(scale * (float)s.weight_ce / (float)s.K);
    const F weight_estep = all(scale * (float)s.weight_estep / (float)s.K);
    const bool with_prior = s.direction == Y_TO_X;
    alignas(64) float t[SMALL * LANES];
    F ce = {}, estep = {};
    for (int64_t k = 0; k < s.K; ++k) {
        to_columns(
            s.t, s.z_dtype, s.C, rows, [&](int64_t i) { return i * s.t_stride_b + k * s.t_stride_k; }, t);
        const F m = lane_maximum(t, s.C * LANES);
        const F sum_f = exp_row(t, m, F{}, s.C * LANES, state.e, t), log_f = log_positive(sum_f);
        F sum_fp = {}, qx = {}, x_y = {};
        for (int64_t j = 0; j < s.C; ++j) {
            const F x = row(t + j * LANES) - m;
            sum_fp = fma(row(state.e + j * LANES), row(state.p + j * LANES), sum_fp);
            qx = fma(row(state.q + j * LANES), x, qx);
            x_y += is(state.y, j, x);
        }
        ce += log_f - x_y;
        estep += own - qx + (with_prior ? log_positive(sum_fp) - own_prior : log_f);
        if (!s.grad_t) continue;
        const F of_f = (with_prior ? weight_ce : weight_ce + weight_estep) / sum_f;
        const F of_fp = with_prior ? weight_estep / sum_fp : F{};
        for (int64_t j = 0; j < s.C; ++j) {
            const F e_weight = fma(of_fp, row(state.p + j * LANES), of_f);
            const F expected = row(state.e + j * LANES) * e_weight - is(state.y, j, weight_ce);
            store(state.e + j * LANES, fma(-weight_estep, row(state.q + j * LANES), expected));
        }
        to_rows(
            state.e, s.z_dtype, s.C, rows, [&](int64_t i) { return (i * s.K + k) * s.C; }, s.grad_t);
    }
    terms.ce = ce / all((float)s.K);
    terms.estep = estep / all((float)s.K);
}

// As update_table.
inline void update_lanes(const Step& s, F clipped, F sample_loss, LaneRows rows, LaneState& state, Scratch& scratch) {
    const F keep = all((float)s.beta), take = all((float)(1.0 - s.beta)) / clipped;
    const I sound = sample_loss - sample_loss == F{};
    for (int64_t j = 0; j < s.C * LANES; j += LANES) {
        const F q = smaller(larger(row(state.q + j), all(CLIP)), all(1.0f - CLIP)), old = row(state.table + j);
        store(state.e + j, sound ? fma(q, take, keep * old) : old);
    }
    to_rows(state.e, s.table_dtype, s.C, rows, [&](int64_t i) { return s.slots[i] * s.C; }, s.M);
    for (int lane = 0; lane < rows.count; ++lane)
        if (is_sound(sample_loss[lane])) s.loss_N[s.slots[rows[lane]]] = sample_loss[lane];
    if (!s.dataset) return;
    load_table(s, rows, state.e);  // as it was stored
    float* const moved = scratch.second_sum;
    for (int64_t j = 0; j < s.C * LANES; j += LANES)
        store(moved + j, row(moved + j) + rows.only(row(state.e + j) - row(state.table + j)));
}

template <int KL>
void step_lanes(const Step& s, const Keys& keys, const Denominator& D, int64_t step, LaneRows rows, Scratch& scratch) {
    LaneState state;
    load_table(s, rows, state.table);
    load_z(s, rows, state);
    state.y = rows.gather(s.labels);
    draw_sets(s, keys, step, rows, state);
    F m, log_sum;
    if (s.live) {
        m = rows.gather(stat(s, MAXIMUM));
        log_sum = rows.gather(stat(s, LOG_SUM));
    } else {
        m = lane_maximum(state.z, s.C * LANES);
        log_sum = log_positive(exp_row(state.z, m, F{}, s.C * LANES, state.q, state.z));
    }
    exp_row(state.z, m, log_sum, s.C * LANES, state.q, state.z);
    F ql = {}, q_log_p = {}, above = {}, Z = {}, weighted_g = {}, pl = {}, total_p = {}, l_y = {};
    for (int64_t j = 0; j < s.C; ++j) {
        const F l = row(state.z + j * LANES) - m - log_sum, q = row(state.q + j * LANES);
        const F p = row(state.p + j * LANES), log_p = row(state.log_p + j * LANES);
        ql = fma(q, l, ql);
        q_log_p = fma(q, log_p, q_log_p);
        l_y += is(state.y, j, l);
        above += smaller(larger(q - all(CLIP), F{}), all(1.0f - 2 * CLIP));
        if (KL == CE) {
            pl = fma(p, l, pl);
            total_p += p;
        } else {
            const F a = p * smaller(q * all(D.inverse[(size_t)j]), all(LARGEST_RATIO));
            Z += a;
            weighted_g = fma(KL == REVERSE ? a : q, log_p - all(D.log[(size_t)j]), weighted_g);
        }
    }
    const F mean_g = KL == REVERSE ? weighted_g / Z : weighted_g, inverse_Z = all(1.0f) / Z;
    LaneTerms terms;
    terms.prior = KL == CE ? -pl : KL == REVERSE ? mean_g - log_positive(Z) : log_positive(Z) - mean_g;
    noisy_lanes(s, D.grad_scale, ql, q_log_p, rows, state, terms);
    if (KL != CE) {
        rows.scatter(inverse_Z, stat(s, INVERSE_Z));
        rows.scatter(mean_g, stat(s, MEAN_G));
    }
    float* const sums = scratch.first_sum;
    for (int64_t j = 0; s.live && KL != CE && j < s.C; ++j) {
        const F q = row(state.q + j * LANES), g = row(state.log_p + j * LANES) - all(D.log[(size_t)j]);
        const F r = row(state.p + j * LANES) * (q * all(D.inverse[(size_t)j])) * inverse_Z;
        const F V = KL == REVERSE ? r * (mean_g - g) : q - r;
        store(sums + j * LANES, row(sums + j * LANES) + rows.only(V));
    }
    if (s.grad_z && (!s.live || KL == CE))
        grad_z_lanes<KL>(s, D, {inverse_Z, mean_g, total_p}, nullptr, rows, state);
    rows.scatter(-l_y, s.sample_loss);
    if (s.update) update_lanes(s, above + all((float)s.C * CLIP), -l_y, rows, state, scratch);
    const double ce = sum(rows.only(terms.ce)), prior = sum(rows.only(terms.prior));
    const double estep = sum(rows.only(terms.estep));
    scratch.terms[0] += s.weight_ce * ce + s.weight_prior * prior + s.weight_estep * estep;
    scratch.terms[1] += ce;
    scratch.terms[2] += prior;
    scratch.terms[3] += estep;
}

template <int KL>
void finish_lanes(const Step& s, const Denominator& D, const float* through, LaneRows rows, Scratch&) {
    LaneState state;
    load_z(s, rows, state);
    kept_priors(s, rows, state);
    exp_row(state.z, rows.gather(stat(s, MAXIMUM)), rows.gather(stat(s, LOG_SUM)), s.C * LANES, state.q, state.z);
    const LaneParts parts = {rows.gather(stat(s, INVERSE_Z)), rows.gather(stat(s, MEAN_G)), F{}};
    grad_z_lanes<KL>(s, D, parts, through, rows, state);
}

template <int KL>
void all_rows(const Step& s) {
    const Keys keys(s.seed);
    write_denominator(s);
    const Denominator D(s);
    const int64_t step = *s.step;
    const bool moves = s.live && s.dataset;
    double terms[4] = {};
    if (s.live) std::fill(s.through, s.through + (moves ? 2 * s.C : s.C), 0.0f);
    for_chunks(
        s,
        [&](Scratch& scratch, int64_t first, int64_t last) {
            scratch.clear(s.C, true);
            prefetch_rows(s, first, last);
            if (s.C <= SMALL) {
                for (int64_t i = first; i < last; i += LANES)
                    step_lanes<KL>(s, keys, D, step, LaneRows(i, last), scratch);
                fold_lanes(s.C, scratch);
            } else {
                for (int64_t i = first; i < last; ++i) step_row<KL>(s, keys, D, step, i, scratch);
            }
        },
        [&](const Scratch& scratch) {
            for (int n = 0; n < 4; ++n) terms[n] += scratch.terms[n];
            if (s.live && KL != CE) add_row(s.through, scratch.first_sum, s.C);
            if (moves) add_row(s.through + s.C, scratch.second_sum, s.C);
        });
    *s.loss = (float)(terms[0] * (double)D.scale);
    s.terms[3] = D.scale / D.grad_scale;
    for (int n = 1; n < 4; ++n) s.terms[n - 1] = (float)(terms[n] / (double)s.B);
    if (s.update && !s.live) ++*s.step;
}

// grad_z of row i once the V of all rows are summed: q is computed again rather than kept.
template <int KL>
inline void finish_row(const Step& s, const Denominator& D, const float* through, int64_t i, Scratch& scratch) {
    const int64_t end = padded(s.C);
    const Softmax soft = kept_softmax(s, i);
    const Prior prior = kept_prior(s, i);
    const float* const z = z_row(s, i, scratch);
    void* const to = at(s.grad_z, i * s.C, s.z_dtype);
    float* const out = out_row(s, to, scratch);  // first holds q
    const float* const inverse_D = D.inverse.get();
    if (!keeps_q(s))
        exp_row(z, all(soft.maximum), all(soft.log_sum), end, out, next_z(s, i));
    else if (out != to)
        kept_q(s, i, out);
    F dot = {};
    for (int64_t j = 0; j < end; j += LANES) {
        __builtin_prefetch(out + end + j, 1);
        dot = fma(row(out + j) * row(inverse_D + j), row(through + j), dot);
    }
    const PriorParts parts = {stat(s, INVERSE_Z)[i], stat(s, MEAN_G)[i], 0.0f};
    write_grad_z<KL>(s, D, prior, parts, sum_direct<KL>(parts) + sum(dot), through, out, out);
    store_row(out, s.z_dtype, s.C, to);
}

template <int KL>
void all_grad_z(const Step& s) {
    const Denominator D(s);
    const std::unique_ptr<float[]> through(new float[(size_t)padded(s.C)]());
    std::copy(s.through, s.through + s.C, through.get());
    for_chunks(
        s,
        [&](Scratch& scratch, int64_t first, int64_t last) {
            if (s.C <= SMALL)
                for (int64_t i = first; i < last; i += LANES)
                    finish_lanes<KL>(s, D, through.get(), LaneRows(i, last), scratch);
            else
                for (int64_t i = first; i < last; ++i) finish_row<KL>(s, D, through.get(), i, scratch);
        },
        [](const Scratch&) {});
}

inline void shift_window(const Step& s) {
    if (!s.window_RC || s.R == 0) return;
    std::memmove(s.window_RC, s.window_RC + s.C, (size_t)((s.R - 1) * s.C) * 4);
    float* const latest = s.window_RC + (s.R - 1) * s.C;
    for (int64_t j = 0; j < s.C; ++j) latest[j] = std::isfinite(s.sums[j]) ? s.sums[j] : 0.0f;
}

// Whether all of [0, size); else `bad` is the lowest if negative, or the highest.
inline bool within(const int64_t* ids, int64_t count, int64_t size, int64_t* bad) {
    int64_t low = ids[0], high = ids[0];
    for (int64_t i = 1; i < count; ++i) {
        low = std::min(low, ids[i]);
        high = std::max(high, ids[i]);
    }
    *bad = low < 0 ? low : high;
    return low >= 0 && high < size;
}

// Whether an id occurs twice, by a table with open addressing at most half full.
inline bool repeats(const int64_t* ids, int64_t count, int64_t* bad) {
    int bits = 4;
    while ((int64_t{1} << bits) < 2 * count) ++bits;
    const uint64_t mask = (uint64_t{1} << bits) - 1;
    const std::unique_ptr<int64_t[]> seen(new int64_t[mask + 1]);
    std::fill(seen.get(), seen.get() + mask + 1, -1);
    for (int64_t i = 0; i < count; ++i) {
        uint64_t slot = ((uint64_t)ids[i] * 0x9E3779B97F4A7C15u) >> (64 - bits);
        while (seen[slot] != -1 && seen[slot] != ids[i]) slot = (slot + 1) & mask;
        if (seen[slot] == ids[i]) {
            *bad = ids[i];
            return true;
        }
        seen[slot] = ids[i];
    }
    return false;
}

}  // namespace

extern "C" {

// 0 if sound; 1 labels, 2 slots, 4 clean out of range, 3 a slot twice, with an offending value.
int fastgnl_check(const Step* s, int64_t* bad) {
    if (!within(s->labels, s->B, s->C, bad)) return 1;
    if (!within(s->slots, s->B, s->N, bad)) return 2;
    if (repeats(s->slots, s->B, bad)) return 3;
    if (s->clean && !within(s->clean, s->B, s->C, bad)) return 4;
    return 0;
}

// Phase 1: sums = [sum_i q_ij | sum_i M_ij (dataset) | B].
void fastgnl_column_sums(const Step* s) {
    const int64_t length = s->dataset ? 2 * s->C : s->C;
    std::fill(s->sums, s->sums + length, 0.0f);
    s->sums[length] = (float)s->B;
    for_chunks(
        *s,
        [&](Scratch& scratch, int64_t first, int64_t last) {
            scratch.clear(s->C, true);
            if (s->C <= SMALL) {
                for (int64_t i = first; i < last; i += LANES) sum_lanes(*s, LaneRows(i, last), scratch);
                fold_lanes(s->C, scratch);
            } else {
                for (int64_t i = first; i < last; ++i) sum_row(*s, i, scratch);
            }
        },
        [&](const Scratch& scratch) {
            add_row(s->sums, scratch.first_sum, s->C);
            if (s->dataset) add_row(s->sums + s->C, scratch.second_sum, s->C);
        });
}

// Phase 2: all but what needs the sum of V over the rows.
void fastgnl_rows(const Step* s) {
    if (s->prior_kl == REVERSE) all_rows<REVERSE>(*s);
    if (s->prior_kl == FORWARD) all_rows<FORWARD>(*s);
    if (s->prior_kl == CE) all_rows<CE>(*s);
}

// Phase 3: grad_z, the column sums or the window, and the step counter.
void fastgnl_finish(const Step* s) {
    if (s->grad_z && s->prior_kl == REVERSE) all_grad_z<REVERSE>(*s);
    if (s->grad_z && s->prior_kl == FORWARD) all_grad_z<FORWARD>(*s);
    if (!s->update) return;
    if (s->dataset) add_row(s->column_sum_C, s->through + s->C, s->C);
    shift_window(*s);
    ++*s->step;
}

}  // extern "C"
