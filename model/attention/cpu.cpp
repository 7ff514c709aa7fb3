// Attention within each sequence of a packed batch, forward and backward, on the CPU.
//
// A task is one sequence and one head. Sixteen queries at a time stand in the lanes of a vector, so that maximum, sum and
// exponential of the softmax need no operation across lanes (online softmax: Milakov and Gimelshein 2018; recomputed
// backward: Dao et al. 2022, algorithm 4). Keys and values are copied once for each task, rotated (RoFormer, Su et al. 2021)
// and laid out for the one inner loop, `accumulate`, that does every product here. With bf16 and AVX512-BF16 that loop
// multiplies pairs; elsewhere it is written in the compiler's vector types, which any processor has.
//
// Legend: T tokens in the batch, L of a sequence, H heads, d channels of a head: HEAD, fixed when this is compiled, so that
// every loop over channels is unrolled.

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace {

constexpr int64_t d = HEAD;
constexpr int LANES = 16;   // queries of a block
constexpr int KEYS = 64;    // keys between two rescalings of the output
constexpr int ROWS = 8;     // accumulators of the inner loop
constexpr float LOG2E = 1.4426950408889634f;
constexpr float LN2 = 0.6931471805599453f;

typedef float Vec __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint16_t bf16;

inline Vec all(float x) { return Vec{} + x; }
inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }

inline float widen(float x) { return x; }
inline float widen(bf16 x) { return __builtin_bit_cast(float, uint32_t(x) << 16); }
inline uint32_t round_bf16(float x) {  // to nearest, ties to even
    const uint32_t bits = __builtin_bit_cast(uint32_t, x);
    return x != x ? 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}
inline void narrow(float x, float *to) { *to = x; }
inline void narrow(float x, bf16 *to) { *to = bf16(round_bf16(x)); }

// 2^x for x <= 0: 2^n from the exponent bits, 2^f by Taylor's polynomial on [-1/2, 1/2]. NaN stays NaN.
template <int DEGREE>
inline Vec exp2_nonpositive(Vec x) {
    constexpr float c[] = {1.f, 0.69314718056f, 0.24022650696f, 0.05550410866f, 0.00961812911f, 0.00133335581f, 0.00015403530f};
    const Vec magic = all(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer
    x = x < all(-126.f) ? all(-126.f) : x;
    Vec shifted = x + magic;
    Vec f = x - (shifted - magic);
    Vec y = all(c[DEGREE]);
    for (int i = DEGREE - 1; i >= 0; --i) y = y * f + c[i];
    return (Vec)((Ints)y + ((Ints)shifted << 23));
}

// How products are formed: STEP neighbours along the summed dimension share one 32-bit item.
struct Single {
    static constexpr int STEP = 1;
    static constexpr int EXP_DEGREE = 6;
    typedef float Item;
    typedef Vec Lanes;
    static inline Item pack(const float *x, int64_t) { return x[0]; }
    static inline Vec fma(Vec sum, Lanes x, Item y) { return sum + x * y; }
    static inline Lanes join(const Vec *p) { return p[0]; }
    static inline void spread(Vec p, Item *to) { memcpy(to, &p, sizeof p); }
};

#ifdef __AVX512BF16__
struct Paired {
    static constexpr int STEP = 2;
    static constexpr int EXP_DEGREE = 3;  // 1e-4, a twentieth of what rounding to bf16 adds
    typedef uint32_t Item;
    typedef Ints Lanes;
    static inline Item pack(const float *x, int64_t stride) { return round_bf16(x[0]) | round_bf16(x[stride]) << 16; }
    static inline Vec fma(Vec sum, Lanes x, Item y) {
        return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)_mm512_set1_epi32(int(y)));
    }
    static inline Lanes join(const Vec *p) {
        Ints low = ((Ints)p[0] + 0x8000) >> 16 & 0xffff, high = ((Ints)p[1] + 0x8000) & int32_t(0xffff0000);
        return low | high;
    }
    static inline void spread(Vec p, Item *to) {
        __m256bh narrowed = _mm512_cvtneps_pbh((__m512)p);
        memcpy(to, &narrowed, sizeof narrowed);
    }
};
#else
typedef Single Paired;
#endif

// sums[r] += sum over c < count of x[c * x_step] * y[r * row + c * column]
template <class M, int R>
inline void accumulate_rows(Vec *sums, const typename M::Lanes *x, int64_t x_step, int64_t count,
                            const typename M::Item *y, int64_t row, int64_t column) {
    Vec s[R];
    for (int r = 0; r < R; ++r) s[r] = sums[r];
    for (int64_t c = 0; c < count; ++c) {
        typename M::Lanes lanes = x[c * x_step];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) s[r] = M::fma(s[r], lanes, y[r * row + c * column]);
    }
    for (int r = 0; r < R; ++r) sums[r] = s[r];
}

template <class M>
inline void accumulate(Vec *sums, int64_t rows, const typename M::Lanes *x, int64_t x_step, int64_t count,
                       const typename M::Item *y, int64_t row, int64_t column) {
    int64_t r = 0;
    for (; r + 8 <= rows; r += 8) accumulate_rows<M, 8>(sums + r, x, x_step, count, y + r * row, row, column);
    if (r + 4 <= rows) accumulate_rows<M, 4>(sums + r, x, x_step, count, y + r * row, row, column), r += 4;
    if (r + 2 <= rows) accumulate_rows<M, 2>(sums + r, x, x_step, count, y + r * row, row, column), r += 2;
    if (r < rows) accumulate_rows<M, 1>(sums + r, x, x_step, count, y + r * row, row, column);
}

struct Rotary {
    const float *cosines, *sines;  // (positions, d/2), or null
    int64_t positions;

    // Rotates channels i and i + d/2 of a row by the angle of its position; turned back with direction -1.
    inline void apply(float *row, int64_t position, float direction) const {
        if (!cosines) return;
        constexpr int64_t half = d / 2;
        const float *c = cosines + position * half, *s = sines + position * half;
        for (int64_t i = 0; i < half; ++i) {
            const float a = row[i], b = row[i + half], sine = direction * s[i];
            row[i] = a * c[i] - b * sine;
            row[i + half] = b * c[i] + a * sine;
        }
    }
};

// One head of one sequence in a (T, H, d) tensor.
template <class E>
struct Head {
    E *data;
    int64_t stride;
    inline void read(float *row, int64_t token) const {
        const E *from = data + token * stride;
        for (int64_t i = 0; i < d; ++i) row[i] = widen(from[i]);
    }
    inline void write(const float *row, int64_t token) const {
        E *to = data + token * stride;
        for (int64_t i = 0; i < d; ++i) narrow(row[i], to + i);
    }
};

inline int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// Memory of one thread, grown as needed and handed out in pieces of whole cache lines.
class Workspace {
    char *memory = nullptr;
    size_t size = 0, used = 0;

  public:
    ~Workspace() { free(memory); }
    bool reserve(size_t bytes) {
        used = 0;
        if (bytes <= size) return true;
        free(memory);
        memory = static_cast<char *>(aligned_alloc(64, round_up(bytes, 64)));
        size = memory ? bytes : 0;
        return memory != nullptr;
    }
    template <class X>
    X *take(int64_t count) {
        X *piece = reinterpret_cast<X *>(memory + used);
        used += round_up(count * sizeof(X), 64);
        return piece;
    }
};

// rows (L, d) fp32 -> along channels: items[token][d / STEP]
template <class M>
void pack_channels(typename M::Item *items, const float *rows, int64_t tokens) {
    constexpr int64_t per_row = d / M::STEP;
    for (int64_t t = 0; t < tokens; ++t)
        for (int64_t i = 0; i < per_row; ++i) items[t * per_row + i] = M::pack(rows + t * d + i * M::STEP, 1);
}

// rows (tokens, d) fp32, tokens a multiple of STEP -> along tokens: items[token / STEP][width], zero beyond d
template <class M>
void pack_tokens(typename M::Item *items, const float *rows, int64_t tokens, int64_t width) {
    for (int64_t t = 0; t < tokens / M::STEP; ++t) {
        for (int64_t i = 0; i < d; ++i) items[t * width + i] = M::pack(rows + t * M::STEP * d + i, d);
        for (int64_t i = d; i < width; ++i) items[t * width + i] = 0;
    }
}

// rows (LANES, d) fp32 -> lanes[d / STEP], one query in each lane
template <class M>
void pack_lanes(typename M::Lanes *lanes, const float *rows) {
    typename M::Item *items = reinterpret_cast<typename M::Item *>(lanes);
    for (int64_t i = 0; i < d / M::STEP; ++i)
        for (int q = 0; q < LANES; ++q) items[i * LANES + q] = M::pack(rows + q * d + i * M::STEP, 1);
}

struct Shape {
    const int32_t *cu_seqlens;
    int64_t num_sequences, num_heads, longest;
    float scale;
};

// Reads tokens of one head, rotated and scaled, as fp32 rows; zero rows up to `padded`.
template <class E>
void read_rows(float *rows, Head<const E> head, int64_t first, int64_t count, int64_t padded, int64_t position,
               Rotary rotary, float factor) {
    for (int64_t t = 0; t < count; ++t) {
        float *row = rows + t * d;
        head.read(row, first + t);
        rotary.apply(row, position + t, 1.f);
        if (factor != 1.f)
            for (int64_t i = 0; i < d; ++i) row[i] *= factor;
    }
    if (padded > count) memset(rows + count * d, 0, (padded - count) * d * sizeof(float));
}

// Writes the transpose of sums[d] (one token in each lane), each token times factor[lane], turned by `rotary`.
template <class E>
void write_lanes(Head<E> head, int64_t first, int64_t count, const Vec *sums, Vec factor, int64_t position,
                 Rotary rotary, float *row) {
    const float *values = reinterpret_cast<const float *>(sums);
    for (int64_t q = 0; q < count; ++q) {
        for (int64_t i = 0; i < d; ++i) row[i] = values[i * LANES + q] * factor[q];
        rotary.apply(row, position + q, -1.f);
        head.write(row, first + q);
    }
}

// Scores of one block of queries against keys first..first+count (count <= KEYS), masked beyond L.
template <class M>
inline void score_block(Vec *scores, const typename M::Lanes *queries, const typename M::Item *keys, int64_t first,
                        int64_t count, int64_t length) {
    constexpr int64_t per_row = d / M::STEP;
    for (int64_t k = 0; k < count; ++k) scores[k] = Vec{};
    accumulate<M>(scores, count, queries, 1, per_row, keys + first * per_row, per_row, 1);
    for (int64_t k = length - first; k < count; ++k) scores[k] = all(-INFINITY);
}

template <class M, class E>
void forward_task(const Shape &shape, Head<const E> q, Head<const E> k, Head<const E> v, Head<E> out, float *lse,
                  int64_t start, int64_t length, Rotary rotary, Workspace &work) {
    typedef typename M::Item Item;
    typedef typename M::Lanes Lanes;
    constexpr int64_t per_row = d / M::STEP;
    const int64_t padded = round_up(length, M::STEP);
    float *rows = work.take<float>((padded > LANES ? padded : LANES) * d);
    Item *keys = work.take<Item>(padded * per_row), *values = work.take<Item>(padded / M::STEP * d);
    Lanes *queries = work.take<Lanes>(per_row), *shares = work.take<Lanes>(KEYS);
    Vec *scores = work.take<Vec>(KEYS), *sums = work.take<Vec>(d);
    read_rows(rows, k, start, length, padded, 0, rotary, 1.f);
    pack_channels<M>(keys, rows, padded);
    read_rows(rows, v, start, length, padded, 0, Rotary{}, 1.f);
    pack_tokens<M>(values, rows, padded, d);
    for (int64_t first_query = 0; first_query < length; first_query += LANES) {
        const int64_t count = length - first_query < LANES ? length - first_query : LANES;
        read_rows(rows, q, start + first_query, count, LANES, first_query, rotary, shape.scale * LOG2E);
        pack_lanes<M>(queries, rows);
        Vec maximum = all(-INFINITY), total = Vec{};
        for (int64_t i = 0; i < d; ++i) sums[i] = Vec{};
        for (int64_t first = 0; first < padded; first += KEYS) {
            const int64_t block = padded - first < KEYS ? padded - first : KEYS;
            score_block<M>(scores, queries, keys, first, block, length);
            Vec new_maximum = maximum;
            for (int64_t key = 0; key < block; ++key) new_maximum = larger(scores[key], new_maximum);
            const Vec correction = exp2_nonpositive<M::EXP_DEGREE>(maximum - new_maximum);
            maximum = new_maximum;
            Vec block_total = Vec{};
            for (int64_t key = 0; key < block; key += M::STEP) {
                Vec p[M::STEP];
                for (int s = 0; s < M::STEP; ++s) {
                    p[s] = exp2_nonpositive<M::EXP_DEGREE>(scores[key + s] - maximum);
                    block_total += p[s];
                }
                shares[key / M::STEP] = M::join(p);
            }
            total = total * correction + block_total;
            if (first)
                for (int64_t i = 0; i < d; ++i) sums[i] *= correction;
            accumulate<M>(sums, d, shares, 1, block / M::STEP, values + first / M::STEP * d, 1, d);
        }
        write_lanes(out, start + first_query, count, sums, 1.f / total, 0, Rotary{}, rows);
        if (lse)
            for (int64_t lane = 0; lane < count; ++lane)
                lse[start + first_query + lane] = maximum[lane] + std::log2(total[lane]);
    }
}

template <class M, class E>
size_t forward_bytes(int64_t longest) {
    const int64_t padded = round_up(longest, LANES);
    return 4 * (3 * padded * d) + 64 * (2 * d + 2 * KEYS) + 64 * 8;
}

template <class M, class E>
struct Gradients {
    Head<const E> q, k, v, out, d_out;
    Head<E> d_q, d_k, d_v;
};

template <class M, class E>
void backward_task(const Shape &shape, const Gradients<M, E> &g, const float *lse, int64_t start, int64_t length,
                   Rotary rotary, Workspace &work) {
    typedef typename M::Item Item;
    typedef typename M::Lanes Lanes;
    constexpr int64_t per_row = d / M::STEP, width = (d + LANES - 1) / LANES * LANES;
    constexpr int64_t vectors = width / LANES, lane_items = LANES / M::STEP;
    const int64_t padded = round_up(length, M::STEP);
    float *rows = work.take<float>((padded > LANES ? padded : LANES) * d);
    float *more_rows = work.take<float>(LANES * d);
    Item *keys = work.take<Item>(padded * per_row), *values = work.take<Item>(padded * per_row);
    Item *keys_by_token = work.take<Item>(padded / M::STEP * d);
    Vec *d_keys = work.take<Vec>(padded * vectors), *d_values = work.take<Vec>(padded * vectors);
    Lanes *queries = work.take<Lanes>(per_row), *d_outs = work.take<Lanes>(per_row);
    Item *queries_by_token = work.take<Item>(lane_items * width), *d_outs_by_token = work.take<Item>(lane_items * width);
    Vec *scores = work.take<Vec>(KEYS), *d_shares = work.take<Vec>(KEYS), *d_queries = work.take<Vec>(d);
    Lanes *d_scores = work.take<Lanes>(KEYS);
    Item *shares_by_key = work.take<Item>(KEYS * LANES), *d_scores_by_key = work.take<Item>(KEYS * LANES);
    Vec sums[ROWS];

    read_rows(rows, g.k, start, length, padded, 0, rotary, 1.f);
    pack_channels<M>(keys, rows, padded);
    pack_tokens<M>(keys_by_token, rows, padded, d);
    read_rows(rows, g.v, start, length, padded, 0, Rotary{}, 1.f);
    pack_channels<M>(values, rows, padded);
    memset(d_keys, 0, padded * vectors * sizeof(Vec));
    memset(d_values, 0, padded * vectors * sizeof(Vec));
    for (int64_t first_query = 0; first_query < length; first_query += LANES) {
        const int64_t count = length - first_query < LANES ? length - first_query : LANES;
        Vec delta = Vec{}, log_total = all(INFINITY);  // queries beyond the end get shares of zero
        read_rows(more_rows, g.out, start + first_query, count, LANES, 0, Rotary{}, 1.f);
        read_rows(rows, g.d_out, start + first_query, count, LANES, 0, Rotary{}, 1.f);
        for (int64_t lane = 0; lane < count; ++lane) {
            float dot = 0;
            for (int64_t i = 0; i < d; ++i) dot += rows[lane * d + i] * more_rows[lane * d + i];
            delta[lane] = dot;
            log_total[lane] = lse[start + first_query + lane];
        }
        pack_lanes<M>(d_outs, rows);
        pack_tokens<M>(d_outs_by_token, rows, LANES, width);
        read_rows(rows, g.q, start + first_query, count, LANES, first_query, rotary, shape.scale * LOG2E);
        pack_lanes<M>(queries, rows);
        pack_tokens<M>(queries_by_token, rows, LANES, width);
        for (int64_t i = 0; i < d; ++i) d_queries[i] = Vec{};
        for (int64_t first = 0; first < padded; first += KEYS) {
            const int64_t block = padded - first < KEYS ? padded - first : KEYS;
            score_block<M>(scores, queries, keys, first, block, length);
            for (int64_t key = 0; key < block; ++key) d_shares[key] = Vec{};
            accumulate<M>(d_shares, block, d_outs, 1, per_row, values + first * per_row, per_row, 1);
            for (int64_t key = 0; key < block; key += M::STEP) {
                Vec d_score[M::STEP];
                for (int s = 0; s < M::STEP; ++s) {
                    Vec share = exp2_nonpositive<M::EXP_DEGREE>(scores[key + s] - log_total);
                    d_score[s] = share * (d_shares[key + s] - delta);
                    M::spread(share, shares_by_key + (key + s) * lane_items);
                    M::spread(d_score[s], d_scores_by_key + (key + s) * lane_items);
                }
                d_scores[key / M::STEP] = M::join(d_score);
            }
            accumulate<M>(d_queries, d, d_scores, 1, block / M::STEP, keys_by_token + first / M::STEP * d, 1, d);
            for (int64_t key = 0; key < block; key += ROWS) {
                const int64_t rows_left = block - key < ROWS ? block - key : ROWS;
                for (int64_t vector = 0; vector < vectors; ++vector) {
                    Vec *to_value = d_values + (first + key) * vectors + vector, *to_key = d_keys + (to_value - d_values);
                    const Lanes *outs = reinterpret_cast<const Lanes *>(d_outs_by_token) + vector;
                    const Lanes *turned = reinterpret_cast<const Lanes *>(queries_by_token) + vector;
                    for (int64_t r = 0; r < rows_left; ++r) sums[r] = to_value[r * vectors];
                    accumulate<M>(sums, rows_left, outs, vectors, lane_items, shares_by_key + key * lane_items, lane_items, 1);
                    for (int64_t r = 0; r < rows_left; ++r) to_value[r * vectors] = sums[r], sums[r] = to_key[r * vectors];
                    accumulate<M>(sums, rows_left, turned, vectors, lane_items, d_scores_by_key + key * lane_items, lane_items, 1);
                    for (int64_t r = 0; r < rows_left; ++r) to_key[r * vectors] = sums[r];
                }
            }
        }
        write_lanes(g.d_q, start + first_query, count, d_queries, all(shape.scale), first_query, rotary, rows);
    }
    for (int64_t t = 0; t < length; ++t) {
        const float *d_value = reinterpret_cast<const float *>(d_values + t * vectors);
        float *d_key = reinterpret_cast<float *>(d_keys + t * vectors);
        g.d_v.write(d_value, start + t);
        for (int64_t i = 0; i < d; ++i) d_key[i] *= LN2;  // the queries were scaled by scale / ln 2
        rotary.apply(d_key, t, -1.f);
        g.d_k.write(d_key, start + t);
    }
}

template <class M, class E>
size_t backward_bytes(int64_t longest) {
    const int64_t padded = round_up(longest, LANES), width = round_up(d, LANES);
    return 4 * (5 * padded * d + 2 * padded * width + LANES * (d + 2 * width)) + 64 * (3 * d + 3 * KEYS + 2 * KEYS) + 64 * 32;
}

// Runs task(sequence, head, workspace) for all of them on `threads` threads; false if memory ran out.
template <class Task>
bool for_each_task(const Shape &shape, int threads, size_t bytes, Task task) {
    bool enough = true;
#pragma omp parallel num_threads(threads) reduction(&& : enough)
    {
        Workspace work;
#pragma omp for collapse(2) schedule(dynamic, 1)
        for (int64_t n = 0; n < shape.num_sequences; ++n)
            for (int64_t h = 0; h < shape.num_heads; ++h)
                if (work.reserve(bytes))
                    task(n, h, work);
                else
                    enough = false;
    }
    return enough;
}

template <class M, class E>
bool forward(const Shape &shape, const void *const *inputs, const int64_t *strides, void *out, float *lse, int64_t T,
             Rotary rotary, int threads) {
    const E *q = static_cast<const E *>(inputs[0]), *k = static_cast<const E *>(inputs[1]), *v = static_cast<const E *>(inputs[2]);
    return for_each_task(shape, threads, forward_bytes<M, E>(shape.longest), [&](int64_t n, int64_t h, Workspace &work) {
        const int64_t start = shape.cu_seqlens[n], length = shape.cu_seqlens[n + 1] - start;
        forward_task<M, E>(shape, {q + h * d, strides[0]}, {k + h * d, strides[1]}, {v + h * d, strides[2]},
                           {static_cast<E *>(out) + h * d, shape.num_heads * d}, lse ? lse + h * T : nullptr, start, length,
                           rotary, work);
    });
}

template <class M, class E>
bool backward(const Shape &shape, const void *const *inputs, const int64_t *strides, void *const *outputs, const float *lse,
              int64_t T, Rotary rotary, int threads) {
    const int64_t dense = shape.num_heads * d;
    return for_each_task(shape, threads, backward_bytes<M, E>(shape.longest), [&](int64_t n, int64_t h, Workspace &work) {
        const int64_t start = shape.cu_seqlens[n], length = shape.cu_seqlens[n + 1] - start;
        auto in = [&](int i) { return Head<const E>{static_cast<const E *>(inputs[i]) + h * d, strides[i]}; };
        auto to = [&](int i) { return Head<E>{static_cast<E *>(outputs[i]) + h * d, dense}; };
        Gradients<M, E> g{in(0), in(1), in(2), in(3), in(4), to(0), to(1), to(2)};
        backward_task<M, E>(shape, g, lse + h * T, start, length, rotary, work);
    });
}

constexpr int OUT_OF_MEMORY = 0, DONE = 1, BAD_SEQUENCES = -1;

// Whether the offsets ascend within 0..T and no sequence is longer than the rotary tables; finds the longest.
bool measure(Shape &shape, int64_t T, const Rotary &rotary) {
    const int32_t *cu = shape.cu_seqlens;
    bool ascending = cu[0] == 0 && cu[shape.num_sequences] == T;
    for (int64_t n = 0; n < shape.num_sequences; ++n) {
        const int64_t length = int64_t(cu[n + 1]) - cu[n];
        ascending &= length >= 0;
        if (length > shape.longest) shape.longest = length;
    }
    return ascending && (!rotary.cosines || shape.longest <= rotary.positions);
}

}  // namespace

extern "C" {

// inputs: q, k, v as (T, H, d) with strides of a token; out (T, H, d) dense; lse (H, T), to base 2, or null.
int esmeray_attention_forward(int is_bf16, const void *const *inputs, const int64_t *strides, void *out, float *lse,
                              const int32_t *cu_seqlens, int64_t num_sequences, int64_t T, int64_t num_heads,
                              const float *cosines, const float *sines, int64_t positions, float scale, int threads) {
    Shape shape{cu_seqlens, num_sequences, num_heads, 0, scale};
    Rotary rotary{cosines, sines, positions};
    if (!measure(shape, T, rotary)) return BAD_SEQUENCES;
    return is_bf16 ? forward<Paired, bf16>(shape, inputs, strides, out, lse, T, rotary, threads)
                   : forward<Single, float>(shape, inputs, strides, out, lse, T, rotary, threads);
}

// inputs: q, k, v, out, d_out; outputs: d_q, d_k, d_v, dense.
int esmeray_attention_backward(int is_bf16, const void *const *inputs, const int64_t *strides, void *const *outputs,
                               const float *lse, const int32_t *cu_seqlens, int64_t num_sequences, int64_t T,
                               int64_t num_heads, const float *cosines, const float *sines,
                               int64_t positions, float scale, int threads) {
    Shape shape{cu_seqlens, num_sequences, num_heads, 0, scale};
    Rotary rotary{cosines, sines, positions};
    if (!measure(shape, T, rotary)) return BAD_SEQUENCES;
    return is_bf16 ? backward<Paired, bf16>(shape, inputs, strides, outputs, lse, T, rotary, threads)
                   : backward<Single, float>(shape, inputs, strides, outputs, lse, T, rotary, threads);
}
}
