// Attention within each sequence of a packed batch, forward and backward, on the CPU.
//
// A task is one sequence and one head. As many queries as a vector register has lanes stand in one, so that sum and exponential
// of the softmax need no operation across lanes (online softmax: Milakov and Gimelshein 2018; recomputed backward: Dao et al.
// 2022, algorithm 4). Keys and values are copied once for each task, rotated (RoFormer, Su et al. 2021) and laid out
// for the one inner loop, `accumulate`, that does every product here. With bf16 and AVX512-BF16 that loop multiplies pairs,
// with AMX tiles of pairs; elsewhere it is written in the compiler's vector types, which any processor has.
//
// Legend: T tokens in the batch, L of a sequence, H heads, d channels of a head: HEAD, fixed when this is compiled, so that
// every loop over channels is unrolled.

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#ifdef __AVX512DQ__
#include <immintrin.h>
#endif
#ifdef __AMX_BF16__
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

constexpr int64_t d = HEAD;
// Queries of a block, as many as a register holds: GCC keeps sums of wider vectors in memory, which is eight times as slow.
#ifdef __AVX512DQ__
constexpr int LANES = 16;
constexpr int SUMS = 16; // sums that the inner loop keeps in registers, half of 32
#else
#ifdef __AVX__
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif
constexpr int SUMS = 12; // of 16 registers: three are left for two blocks of queries and an item of a key
#endif
constexpr int BLOCKS = 2; // blocks per forward iteration: they share loads and hide latency
constexpr int KEYS = SUMS * 8; // keys between two additions to the output
constexpr int SPARE = 32; // rows beyond a sequence: no block of queries or keys is larger
constexpr float LARGEST = 1ull << 60; // if a sum of weights exceeds it, weights are rescaled to a larger score
constexpr float LOG2E = 1.4426950408889634f;
constexpr float LN2 = 0.6931471805599453f;

typedef float Vec __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint16_t bf16;

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
constexpr int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }
inline Vec all(float x) { return Vec{} + x; }
inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }
inline bool any(Ints x) {
    int32_t found = 0;
    for (int lane = 0; lane < LANES; ++lane) found |= x[lane];
    return found != 0;
}

inline float widen(float x) { return x; }
inline float widen(bf16 x) { return __builtin_bit_cast(float, uint32_t(x) << 16); }
// To nearest, ties to even. NaN stays NaN: no value here comes close to overflow.
inline uint32_t round_bf16(float x) {
    const uint32_t bits = __builtin_bit_cast(uint32_t, x);
    return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}
inline void narrow(float x, float *to) { *to = x; }
inline void narrow(float x, bf16 *to) { *to = bf16(round_bf16(x)); }

// 2^x = 2^n p(x - n), n = floor(x), with the minimax (relative error) polynomial on [0, 1]. NaN stays NaN.
template <class M>
inline Vec exp2(Vec x) {
    constexpr int degree = sizeof M::EXP2 / sizeof M::EXP2[0] - 1;
#ifdef __AVX512DQ__
    const Vec f = (Vec)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF);
#else
    const Vec magic = all(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer
    x = x < all(-126.f) ? all(-126.f) : x;
    x = x > all(127.f) ? all(127.f) : x;
    const Vec shifted = (x - 0.5f) + magic, f = x - (shifted - magic);
#endif
    Vec y = all(M::EXP2[degree]);
    for (int i = degree - 1; i >= 0; --i) y = y * f + M::EXP2[i];
#ifdef __AVX512DQ__
    return (Vec)_mm512_scalef_ps((__m512)y, (__m512)x);
#else
    return (Vec)((Ints)y + ((Ints)shifted << 23));
#endif
}

// How products are formed: STEP neighbours along the summed dimension share one 32-bit item. ROWS: keys of the inner loop.
struct Single {
    static constexpr int STEP = 1, ROWS = SUMS == 12 ? 12 : 8;
    static constexpr bool TILED = false;
    struct Tiles {};
    static constexpr float EXP2[] = {0.9999999251f, 0.6931530732f, 0.2401536170f,  // to 7.5e-8
                                     0.0558263181f, 0.0089893401f, 0.0018775767f};
    typedef float Element;
    typedef float Item;
    typedef Vec Lanes;
    static inline Item pack(const Element *x, int64_t) { return x[0]; }
    static inline Vec fma(Vec sum, Lanes x, Item y) { return sum + x * y; }
    static inline Lanes join(const Vec *p, int64_t) { return p[0]; }
    static inline void spread(Vec p, Item *to) { memcpy(to, &p, sizeof p); }
};

#ifdef __AVX512BF16__
struct Paired {
    static constexpr int STEP = 2, ROWS = 8;
    static constexpr bool TILED = false;
    struct Tiles {};
    // Accurate to 7.5e-5, a twentieth of the rounding to bf16.
    static constexpr float EXP2[] = {0.9999252186f, 0.6958335405f, 0.2260671554f, 0.0780245226f};
    typedef bf16 Element;
    typedef uint32_t Item;
    typedef Ints Lanes;
    static inline Item pack(const Element *x, int64_t stride) { return x[0] | uint32_t(x[stride]) << 16; }
    static inline Vec fma(Vec sum, Lanes x, Item y) {
        return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)_mm512_set1_epi32(int(y)));
    }
    static inline Lanes join(const Vec *p, int64_t step) {
        const Ints order = Ints{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} * 0x10001 + 0x100000;
        return (Ints)_mm512_permutexvar_epi16((__m512i)order, (__m512i)_mm512_cvtne2ps_pbh((__m512)p[step], (__m512)p[0]));
    }
    static inline void spread(Vec p, Item *to) {
        __m256bh narrowed = _mm512_cvtneps_pbh((__m512)p);
        memcpy(to, &narrowed, sizeof narrowed);
    }
};
#else
typedef Single Paired;
#endif

#ifdef __AMX_BF16__
constexpr int TILE = 16;  // rows of a tile, and items of a row
struct Tiled : Paired {
    static constexpr int ROWS = 2 * TILE;
    static constexpr bool TILED = true;
    // Tile configuration of a thread for its lifetime; the previous one is restored, since oneDNN may rely on it.
    struct Tiles {
        alignas(64) uint8_t before[64];
        Tiles() {
            _tile_storeconfig(before);
            alignas(64) struct {
                uint8_t palette = 1, start_row = 0, reserved[14] = {};
                uint16_t bytes_of_row[16] = {};
                uint8_t rows[16] = {};
            } shape;
            for (int tile = 0; tile < 8; ++tile) shape.bytes_of_row[tile] = 4 * TILE, shape.rows[tile] = TILE;
            _tile_loadconfig(&shape);
        }
        ~Tiles() {
            if (before[0])
                _tile_loadconfig(before);
            else
                _tile_release();
        }
    };
};

// Linux (5.16) enables tiles for a process on request.
bool has_tiles() {
    constexpr long request = 0x1023, tile_data = 18;
    static const bool allowed = syscall(SYS_arch_prctl, request, tile_data) == 0;
    return allowed;
}

// Like `accumulate`, for whole tiles: 2 x 2 tiles of rows and blocks at once, which share loads.
template <int B>
inline void accumulate_tiles(Vec *sums, int64_t rows, const Ints *x, int64_t x_step, int64_t count, const uint32_t *y,
                             int64_t row) {
    asm volatile("" ::: "memory"); // GCC does not know the memory that tiles read
    const auto at = [&](int64_t r, int64_t b) { return sums + r * B + b; };
    const int64_t sums_bytes = sizeof(Vec) * B, x_bytes = sizeof(Ints) * x_step, y_bytes = 4 * row;
    for (int64_t r = 0; r < rows; r += 2 * TILE)
        for (int64_t b = 0; b < B; b += 2) {
            const bool down = r + TILE < rows, across = b + 1 < B;
            _tile_loadd(0, at(r, b), sums_bytes);
            if (across) _tile_loadd(1, at(r, b + 1), sums_bytes);
            if (down) _tile_loadd(2, at(r + TILE, b), sums_bytes);
            if (down && across) _tile_loadd(3, at(r + TILE, b + 1), sums_bytes);
            for (int64_t c = 0; c < count; c += TILE) {
                _tile_loadd(4, y + r * row + c, y_bytes);
                _tile_loadd(6, x + c * x_step + b, x_bytes);
                _tile_dpbf16ps(0, 4, 6);
                if (across) {
                    _tile_loadd(7, x + c * x_step + b + 1, x_bytes);
                    _tile_dpbf16ps(1, 4, 7);
                }
                if (down) {
                    _tile_loadd(5, y + (r + TILE) * row + c, y_bytes);
                    _tile_dpbf16ps(2, 5, 6);
                    if (across) _tile_dpbf16ps(3, 5, 7);
                }
            }
            _tile_stored(0, at(r, b), sums_bytes);
            if (across) _tile_stored(1, at(r, b + 1), sums_bytes);
            if (down) _tile_stored(2, at(r + TILE, b), sums_bytes);
            if (down && across) _tile_stored(3, at(r + TILE, b + 1), sums_bytes);
        }
    asm volatile("" ::: "memory");
}
#else
typedef Paired Tiled;
inline bool has_tiles() { return false; }
template <int, class... X>
void accumulate_tiles(X...) {}
#endif

// Sizes padded to whole tiles: channels of a row, their items, and rows of channels.
template <class M>
constexpr int64_t WIDTH = M::TILED ? round_up(d, 32) : d;
template <class M>
constexpr int64_t PER_ROW = WIDTH<M> / M::STEP;
template <class M>
constexpr int64_t CHANNELS = M::TILED ? round_up(d, 16) : d;

// sums[r * sums_step + b] += sum over c < count of x[c * x_step + b] * y[r * row + c * column], for b < B
template <class M, int R, int B>
inline void accumulate_rows(Vec *sums, int64_t sums_step, const typename M::Lanes *x, int64_t x_step, int64_t count,
                            const typename M::Item *y, int64_t row, int64_t column) {
    Vec s[R * B];
    for (int r = 0; r < R * B; ++r) s[r] = sums[r / B * sums_step + r % B];
    for (int64_t c = 0; c < count; ++c)
#pragma GCC unroll 16
        for (int r = 0; r < R * B; ++r) s[r] = M::fma(s[r], x[c * x_step + r % B], y[r / B * row + c * column]);
    for (int r = 0; r < R * B; ++r) sums[r / B * sums_step + r % B] = s[r];
}

// The same for any number of rows, R at once, and fewer for the last ones.
template <class M, int B, int R = SUMS / (B < 2 ? 2 : B)>
inline void accumulate(Vec *sums, int64_t sums_step, int64_t rows, const typename M::Lanes *x, int64_t x_step,
                       int64_t count, const typename M::Item *y, int64_t row, int64_t column) {
    if constexpr (M::TILED) return accumulate_tiles<B>(sums, rows, x, x_step, count, y, row);
    int64_t r = 0;
    for (; r + R <= rows; r += R) accumulate_rows<M, R, B>(sums + r * sums_step, sums_step, x, x_step, count, y + r * row, row, column);
    if constexpr (R > 1)
        if (r < rows)
            accumulate<M, B, R == 6 ? 4 : R / 2>(sums + r * sums_step, sums_step, rows - r, x, x_step, count, y + r * row, row, column);
}

struct Rotary {
    const float *cosines, *sines;  // (positions, d/2), or null
    int64_t positions;

    // Copies a row times `factor`, with channels i and i + d/2 rotated by the angle of its position; direction -1
    // rotates back.
    template <class X, class Y>
    inline void copy(const X *from, Y *to, int64_t position, float direction, float factor) const {
        if (!cosines) {
#pragma omp simd
            for (int64_t i = 0; i < d; ++i) narrow(widen(from[i]) * factor, to + i);
            return;
        }
        constexpr int64_t half = d / 2;
        const float *c = cosines + position * half, *s = sines + position * half;
#pragma omp simd
        for (int64_t i = 0; i < half; ++i) {
            const float a = widen(from[i]), b = widen(from[i + half]);
            const float cosine = factor * c[i], sine = factor * direction * s[i];
            narrow(a * cosine - b * sine, to + i);
            narrow(b * cosine + a * sine, to + i + half);
        }
    }
};

// One head of one sequence in a (T, H, d) tensor.
template <class E>
struct Head {
    E *data;
    int64_t stride;
    inline E *row(int64_t token) const { return data + token * stride; }
};


// Workspace of one thread, grown as needed; pieces are aligned to cache lines.
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

// rows (tokens, d), tokens a multiple of STEP -> along tokens: items[token / STEP][width], zero beyond d
template <class M>
void pack_tokens(typename M::Item *items, const typename M::Element *rows, int64_t tokens, int64_t width) {
    for (int64_t t = 0; t < tokens / M::STEP; ++t) {
#pragma omp simd
        for (int64_t i = 0; i < d; ++i) items[t * width + i] = M::pack(rows + t * M::STEP * WIDTH<M> + i, WIDTH<M>);
        for (int64_t i = d; i < width; ++i) items[t * width + i] = 0;
    }
}

// The same, to be multiplied by rows of channels: a tile needs items[channel][token / STEP].
template <class M>
void pack_channels(typename M::Item *items, const typename M::Element *rows, int64_t tokens) {
    if constexpr (!M::TILED) return pack_tokens<M>(items, rows, tokens, d);
    const int64_t pairs = tokens / M::STEP;
    for (int64_t t = 0; t < pairs; ++t)
        for (int64_t i = 0; i < CHANNELS<M>; ++i)
            items[i * pairs + t] = M::pack(rows + t * M::STEP * WIDTH<M> + i, WIDTH<M>);
}

// sums[channel][b] += products over the tokens from `first`, packed by channels
template <class M, int B>
inline void accumulate_channels(Vec *sums, const typename M::Lanes *x, int64_t count, const typename M::Item *channels,
                                int64_t first, int64_t tokens) {
    const int64_t pair = first / M::STEP;
    const typename M::Item *y = M::TILED ? channels + pair : channels + pair * d;
    accumulate<M, B>(sums, B, CHANNELS<M>, x, B, count, y, M::TILED ? tokens / M::STEP : 1, M::TILED ? 1 : d);
}

// rows (queries, d) -> lanes[d / STEP][queries / LANES], one query per lane
template <class M>
void pack_lanes(typename M::Lanes *lanes, const typename M::Element *rows, int64_t queries) {
    const auto *from = reinterpret_cast<const typename M::Item *>(rows);
    auto *items = reinterpret_cast<typename M::Item *>(lanes);
    for (int64_t i = 0; i < PER_ROW<M>; ++i)
        for (int64_t q = 0; q < queries; ++q) items[i * queries + q] = from[q * PER_ROW<M> + i];
}

struct Shape {
    const int32_t *cu_seqlens;
    int64_t num_sequences, num_heads, longest;
    float scale;
};

// Reads tokens of one head, rotated and scaled, as rows to multiply; zero rows up to `padded`.
template <class M, class X, class E>
void read_rows(X *rows, Head<const E> head, int64_t first, int64_t count, int64_t padded, int64_t position, Rotary rotary,
               float factor) {
    for (int64_t t = 0; t < count; ++t) {
        rotary.copy(head.row(first + t), rows + t * WIDTH<M>, position + t, 1.f, factor);
        for (int64_t i = d; i < WIDTH<M>; ++i) rows[t * WIDTH<M> + i] = 0;
    }
    if (padded > count) memset(rows + count * WIDTH<M>, 0, (padded - count) * WIDTH<M> * sizeof(X));
}

// Writes the transpose of sums[0], sums[step] ... (d vectors, one token per lane), each token times factor[lane],
// rotated back by `rotary`.
template <class E>
void write_lanes(Head<E> head, int64_t first, int64_t count, const Vec *sums, int64_t step, Vec factor, int64_t position,
                 Rotary rotary) {
    float row[d];
    const float *values = reinterpret_cast<const float *>(sums);
    for (int64_t q = 0; q < count; ++q) {
        for (int64_t i = 0; i < d; ++i) row[i] = values[i * step * LANES + q];
        rotary.copy(row, head.row(first + q), position + q, -1.f, factor[q]);
    }
}

// Scores of B blocks of queries for ROWS keys from `first`, -inf from `length` on.
template <class M, int B>
inline void score_rows(Vec *scores, const typename M::Lanes *queries, const typename M::Item *keys, int64_t first,
                       int64_t length) {
    for (int64_t k = 0; k < M::ROWS * B; ++k) scores[k] = Vec{};
    accumulate<M, B>(scores, B, M::ROWS, queries, B, PER_ROW<M>, keys + first * PER_ROW<M>, PER_ROW<M>, 1);
    for (int64_t k = (length - first) * B; k < M::ROWS * B; ++k) scores[k] = all(-INFINITY);
}

// Raises `shift` to the largest score of keys first..last.
template <class M, int B>
void raise(Vec *shift, const typename M::Lanes *queries, const typename M::Item *keys, int64_t first, int64_t last,
           int64_t length) {
    for (; first < last; first += M::ROWS) {
        Vec scores[M::ROWS * B];
        score_rows<M, B>(scores, queries, keys, first, length);
        for (int64_t k = 0; k < M::ROWS * B; ++k) shift[k % B] = larger(scores[k], shift[k % B]);
    }
}

// Weights 2^(score - shift) of keys first..last, and their sums.
template <class M, int B>
inline void share_keys(typename M::Lanes *shares, Vec *totals, const typename M::Lanes *queries,
                       const typename M::Item *keys, int64_t first, int64_t last, int64_t length, const Vec *shift) {
    for (int b = 0; b < B; ++b) totals[b] = Vec{};
    for (; first < last; first += M::ROWS) {
        Vec p[M::ROWS * B];
        score_rows<M, B>(p, queries, keys, first, length);
#pragma GCC unroll 16
        for (int64_t k = 0; k < M::ROWS * B; ++k) totals[k % B] += p[k] = exp2<M>(p[k] - shift[k % B]);
#pragma GCC unroll 16
        for (int64_t k = 0; k < M::ROWS * B / M::STEP; ++k) *shares++ = M::join(p + k / B * M::STEP * B + k % B, B);
    }
}

// Weights are relative to the largest score of the first keys, and rescaled only if their sum gets too large: 2^x is as
// exact for x > 0. So scores and weights need one pass, without a maximum.
template <class M, class E>
void forward_task(const Shape &shape, Head<const E> q, Head<const E> k, Head<const E> v, Head<E> out, float *lse,
                  int64_t start, int64_t length, Rotary rotary, Workspace &work) {
    typedef typename M::Item Item;
    typedef typename M::Lanes Lanes;
    typedef typename M::Element Element;
    const int64_t padded = round_up(length, M::ROWS);
    Element *rows = work.take<Element>((length + SPARE) * WIDTH<M>);
    Item *keys = work.take<Item>(padded * PER_ROW<M>), *values = work.take<Item>(padded / M::STEP * CHANNELS<M>);
    Lanes *queries = work.take<Lanes>(BLOCKS * PER_ROW<M>), *shares = work.take<Lanes>(BLOCKS * KEYS);
    Vec *sums = work.take<Vec>(BLOCKS * CHANNELS<M>);
    read_rows<M>(reinterpret_cast<Element *>(keys), k, start, length, padded, 0, rotary, 1.f);
    read_rows<M>(rows, v, start, length, padded, 0, Rotary{}, 1.f);
    pack_channels<M>(values, rows, padded);
    const auto attend = [&](auto blocks, int64_t first_query, int64_t count) {
        constexpr int B = decltype(blocks)::value;
        read_rows<M>(rows, q, start + first_query, count, B * LANES, first_query, rotary, shape.scale * LOG2E);
        pack_lanes<M>(queries, rows, B * LANES);
        Vec shift[B], totals[B] = {}, block_totals[B];
        for (int b = 0; b < B; ++b) shift[b] = all(-FLT_MAX);
        raise<M, B>(shift, queries, keys, 0, M::ROWS, length);
        for (int64_t i = 0; i < B * CHANNELS<M>; ++i) sums[i] = Vec{};
        for (int64_t first = 0; first < padded; first += KEYS) {
            const int64_t last = least(padded, first + KEYS);
            share_keys<M, B>(shares, block_totals, queries, keys, first, last, length, shift);
            Ints large = Ints{};
            for (int b = 0; b < B; ++b) large |= block_totals[b] > LARGEST;
            if (any(large)) {
                Vec correction[B];
                for (int b = 0; b < B; ++b) correction[b] = shift[b];
                raise<M, B>(shift, queries, keys, first, last, length);
                for (int b = 0; b < B; ++b) totals[b] *= correction[b] = exp2<M>(correction[b] - shift[b]);
                for (int64_t i = 0; i < B * d; ++i) sums[i] *= correction[i % B];
                share_keys<M, B>(shares, block_totals, queries, keys, first, last, length, shift);
            }
            for (int b = 0; b < B; ++b) totals[b] += block_totals[b];
            accumulate_channels<M, B>(sums, shares, (last - first) / M::STEP, values, first, padded);
        }
        for (int b = 0; b < B; ++b) {
            const int64_t token = start + first_query + b * LANES, tokens = least(count - b * LANES, LANES);
            write_lanes(out, token, tokens, sums + b, B, 1.f / totals[b], 0, Rotary{});
            if (lse)
                for (int64_t lane = 0; lane < tokens; ++lane) lse[token + lane] = shift[b][lane] + std::log2(totals[b][lane]);
        }
    };
    int64_t query = 0;
    for (; query + (BLOCKS - 1) * LANES < length; query += BLOCKS * LANES)
        attend(std::integral_constant<int, BLOCKS>{}, query, least(length - query, BLOCKS * LANES));
    if (query < length) attend(std::integral_constant<int, 1>{}, query, length - query);
}

template <class M, class E>
size_t forward_bytes(int64_t longest) {
    const int64_t padded = longest + SPARE;
    return 4 * (3 * padded * WIDTH<M>) + 64 * BLOCKS * (2 * WIDTH<M> + KEYS) + 64 * 8;
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
    constexpr int B = M::TILED || LANES < 16 ? BLOCKS : 1, QUERIES = B * LANES;
    constexpr int64_t width = round_up(d, LANES), vectors = width / LANES, lane_items = QUERIES / M::STEP;
    typedef typename M::Element Element;
    const int64_t padded = round_up(length, M::ROWS);
    Element *rows = work.take<Element>(QUERIES * WIDTH<M>), *outs = work.take<Element>(QUERIES * WIDTH<M>);
    Item *keys = work.take<Item>(padded * PER_ROW<M>), *values = work.take<Item>(padded * PER_ROW<M>);
    Item *keys_by_token = work.take<Item>(padded / M::STEP * CHANNELS<M>);
    Vec *d_keys = work.take<Vec>(padded * vectors), *d_values = work.take<Vec>(padded * vectors);
    Lanes *queries = work.take<Lanes>(B * PER_ROW<M>), *d_outs = work.take<Lanes>(B * PER_ROW<M>);
    Item *queries_by_token = work.take<Item>(lane_items * width), *d_outs_by_token = work.take<Item>(lane_items * width);
    Vec *scores = work.take<Vec>(B * KEYS), *d_shares = work.take<Vec>(B * KEYS), *d_queries = work.take<Vec>(B * CHANNELS<M>);
    Lanes *d_scores = work.take<Lanes>(B * KEYS);
    Item *shares_by_key = work.take<Item>(KEYS * lane_items), *d_scores_by_key = work.take<Item>(KEYS * lane_items);

    read_rows<M>(reinterpret_cast<Element *>(keys), g.k, start, length, padded, 0, rotary, 1.f);
    pack_channels<M>(keys_by_token, reinterpret_cast<Element *>(keys), padded);
    read_rows<M>(reinterpret_cast<Element *>(values), g.v, start, length, padded, 0, Rotary{}, 1.f);
    memset(d_keys, 0, padded * vectors * sizeof(Vec));
    memset(d_values, 0, padded * vectors * sizeof(Vec));
    for (int64_t first_query = 0; first_query < length; first_query += QUERIES) {
        const int64_t count = least(length - first_query, QUERIES);
        Vec delta[B] = {}, log_total[B];
        for (int b = 0; b < B; ++b) log_total[b] = all(INFINITY); // queries beyond the end get zero weights
        read_rows<M>(outs, g.out, start + first_query, count, QUERIES, 0, Rotary{}, 1.f);
        read_rows<M>(rows, g.d_out, start + first_query, count, QUERIES, 0, Rotary{}, 1.f);
        for (int64_t lane = 0; lane < count; ++lane) {
            float dot = 0;
            for (int64_t i = 0; i < d; ++i) dot += widen(rows[lane * WIDTH<M> + i]) * widen(outs[lane * WIDTH<M> + i]);
            delta[lane / LANES][lane % LANES] = dot;
            log_total[lane / LANES][lane % LANES] = lse[start + first_query + lane];
        }
        pack_lanes<M>(d_outs, rows, QUERIES);
        pack_tokens<M>(d_outs_by_token, rows, QUERIES, width);
        read_rows<M>(rows, g.q, start + first_query, count, QUERIES, first_query, rotary, shape.scale * LOG2E);
        pack_lanes<M>(queries, rows, QUERIES);
        pack_tokens<M>(queries_by_token, rows, QUERIES, width);
        for (int64_t i = 0; i < B * CHANNELS<M>; ++i) d_queries[i] = Vec{};
        for (int64_t first = 0; first < padded; first += KEYS) {
            const int64_t block = padded - first < KEYS ? padded - first : KEYS;
            for (int64_t key = 0; key < block; key += M::ROWS)
                score_rows<M, B>(scores + key * B, queries, keys, first + key, length);
            for (int64_t key = 0; key < block * B; ++key) d_shares[key] = Vec{};
            accumulate<M, B>(d_shares, B, block, d_outs, B, PER_ROW<M>, values + first * PER_ROW<M>, PER_ROW<M>, 1);
            for (int64_t key = 0; key < block; key += M::STEP)
                for (int b = 0; b < B; ++b) {
                    Vec d_score[M::STEP];
                    for (int s = 0; s < M::STEP; ++s) {
                        const int64_t score = (key + s) * B + b, item = (key + s) * lane_items + b * LANES / M::STEP;
                        Vec share = exp2<M>(scores[score] - log_total[b]);
                        d_score[s] = share * (d_shares[score] - delta[b]);
                        M::spread(share, shares_by_key + item);
                        M::spread(d_score[s], d_scores_by_key + item);
                    }
                    d_scores[key / M::STEP * B + b] = M::join(d_score, 1);
                }
            accumulate_channels<M, B>(d_queries, d_scores, block / M::STEP, keys_by_token, first, padded);
            if constexpr (M::TILED) {
                const auto *d_out = reinterpret_cast<const Lanes *>(d_outs_by_token);
                const auto *turned = reinterpret_cast<const Lanes *>(queries_by_token);
                accumulate<M, vectors>(d_values + first * vectors, vectors, block, d_out, vectors, lane_items, shares_by_key, lane_items, 1);
                accumulate<M, vectors>(d_keys + first * vectors, vectors, block, turned, vectors, lane_items, d_scores_by_key, lane_items, 1);
                continue;
            }
            const auto add = [&](Vec *to, const Item *by_token, const Item *by_key) {
                const Lanes *lanes = reinterpret_cast<const Lanes *>(by_token);
                for (int64_t key = 0; key < block; key += M::ROWS) {
                    Vec *sums = to + (first + key) * vectors;
                    const Item *y = by_key + key * lane_items;
                    int64_t vector = 0;
                    for (; vector + B <= vectors; vector += B)
                        accumulate<M, B>(sums + vector, vectors, M::ROWS, lanes + vector, vectors, lane_items, y, lane_items, 1);
                    if (vector < vectors)
                        accumulate<M, 1>(sums + vector, vectors, M::ROWS, lanes + vector, vectors, lane_items, y, lane_items, 1);
                }
            };
            add(d_values, d_outs_by_token, shares_by_key);
            add(d_keys, queries_by_token, d_scores_by_key);
        }
        for (int64_t b = 0; b < B && b * LANES < count; ++b) {
            const int64_t query = first_query + b * LANES;
            write_lanes(g.d_q, start + query, least(count - b * LANES, LANES), d_queries + b, B, all(shape.scale), query, rotary);
        }
    }
    for (int64_t t = 0; t < length; ++t) {
        const float *d_value = reinterpret_cast<const float *>(d_values + t * vectors);
        const float *d_key = reinterpret_cast<const float *>(d_keys + t * vectors);
        Rotary{}.copy(d_value, g.d_v.row(start + t), t, 1.f, 1.f);
        rotary.copy(d_key, g.d_k.row(start + t), t, -1.f, LN2);  // the queries were scaled by scale / ln 2
    }
}

template <class M, class E>
size_t backward_bytes(int64_t longest) {
    const int64_t padded = longest + SPARE, width = round_up(d, LANES);
    return 4 * (5 * padded * WIDTH<M> + 2 * padded * width) + 2 * (4 * LANES * (WIDTH<M> + 2 * width) +
           64 * (3 * WIDTH<M> + 3 * KEYS + 2 * KEYS)) + 64 * 32;
}

// Runs task(sequence, head, workspace) for all pairs on `threads` threads; false if out of memory.
template <class M, class Task>
bool for_each_task(const Shape &shape, int threads, size_t bytes, Task task) {
    bool enough = true;
#pragma omp parallel num_threads(threads) reduction(&& : enough)
    {
        Workspace work;
        [[maybe_unused]] typename M::Tiles tiles;
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
    return for_each_task<M>(shape, threads, forward_bytes<M, E>(shape.longest), [&](int64_t n, int64_t h, Workspace &work) {
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
    return for_each_task<M>(shape, threads, backward_bytes<M, E>(shape.longest), [&](int64_t n, int64_t h, Workspace &work) {
        const int64_t start = shape.cu_seqlens[n], length = shape.cu_seqlens[n + 1] - start;
        auto in = [&](int i) { return Head<const E>{static_cast<const E *>(inputs[i]) + h * d, strides[i]}; };
        auto to = [&](int i) { return Head<E>{static_cast<E *>(outputs[i]) + h * d, dense}; };
        Gradients<M, E> g{in(0), in(1), in(2), in(3), in(4), to(0), to(1), to(2)};
        backward_task<M, E>(shape, g, lse + h * T, start, length, rotary, work);
    });
}

constexpr int OUT_OF_MEMORY = 0, DONE = 1, BAD_SEQUENCES = -1;

// Tests that the offsets ascend within 0..T and no sequence is longer than the rotary tables; finds the longest.
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
    if (is_bf16 && has_tiles()) return forward<Tiled, bf16>(shape, inputs, strides, out, lse, T, rotary, threads);
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
    if (is_bf16 && has_tiles()) return backward<Tiled, bf16>(shape, inputs, strides, outputs, lse, T, rotary, threads);
    return is_bf16 ? backward<Paired, bf16>(shape, inputs, strides, outputs, lse, T, rotary, threads)
                   : backward<Single, float>(shape, inputs, strides, outputs, lse, T, rotary, threads);
}
}
