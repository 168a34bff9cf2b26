// 3x3 convolutions of stride 1 by Winograd's minimal filtering F(4x4, 3x3) (Lavin & Gray 2016, Section 4): 36
// multiplications for a tile of 4x4 outputs, not 144. Everything is channels last. Departure from the paper: nothing that is
// transformed is ever whole in memory; a chunk of tiles and a panel of channels are taken through all three stages at a time,
// so that they stay in the cache. The gradients are the adjoints of the same transforms.
#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <new>
#include <utility>

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16, ROWS = 12;  // 24 registers of sums
#elif defined(__AVX__)
constexpr int LANES = 8, ROWS = 6;
#else
constexpr int LANES = 4, ROWS = 6;
#endif
constexpr int TILE = 4, POINTS = 36;
constexpr int PANEL = 32;               // channels taken at a time
constexpr int DEPTH = 64;               // channels summed over at a time, at most: transformed filters stay in the cache
constexpr int MOST_TILES = 32;          // tiles taken at a time: at most these,
constexpr int MOST_NUMBERS = 64 * 128;  // and at most these, times channels

typedef float Vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

Vec& vec(float* at) { return *(Vec*)at; }
const Vec& vec(const float* at) { return *(const Vec*)at; }

// One matrix for each of the 36 points, the matrices apart by other than a power of two: they would compete for
// the same lines of the cache.
class Points {
   public:
    explicit Points(long size) : stride(size + 16), data((float*)operator new(4 * POINTS * stride, ALIGNED)) {}
    float* operator[](int point) const { return data.get() + point * stride; }

   private:
    static constexpr std::align_val_t ALIGNED{64};
    struct Free {
        void operator()(float* data) const { operator delete(data, ALIGNED); }
    };
    long stride;
    std::unique_ptr<float, Free> data;
};

// Rows: the points 0, 1, -1, 2, -2 and infinity. The rows of a point and of its negative differ in the signs of the odd
// columns only.
template <int C>
struct Matrix {
    static constexpr int columns = C;
    float at[6][C];
};
constexpr Matrix<6> INPUT{{{4, 0, -5, 0, 1, 0},
                           {0, -4, -4, 1, 1, 0},
                           {0, 4, -4, -1, 1, 0},
                           {0, -2, -1, 2, 1, 0},
                           {0, 2, -1, -2, 1, 0},
                           {0, 4, 0, -5, 0, 1}}};
constexpr Matrix<3> FILTER{{{1 / 4.f, 0, 0},
                            {-1 / 6.f, -1 / 6.f, -1 / 6.f},
                            {-1 / 6.f, 1 / 6.f, -1 / 6.f},
                            {1 / 24.f, 1 / 12.f, 1 / 6.f},
                            {1 / 24.f, -1 / 12.f, 1 / 6.f},
                            {0, 0, 1}}};
constexpr Matrix<4> OUTPUT{{{1, 0, 0, 0}, {1, 1, 1, 1}, {1, -1, 1, -1}, {1, 2, 4, 8}, {1, -2, 4, -8}, {0, 0, 0, 1}}};

// A sum of multiples; those by the constant 0 vanish when this is compiled.
struct Sum {
    Vec value{};
    bool empty = true;
    [[gnu::always_inline]] void add(float factor, Vec term) {
        if (factor == 0) return;
        value = empty ? factor * term : value + factor * term;
        empty = false;
    }
};

// put(p, …) the rows of M in
template <const auto& M, class Put>
[[gnu::always_inline]] inline void to_points(const Vec* in, int in_step, Put put) {
#pragma GCC unroll 2
    for (int p : {0, 5}) {
        Sum sum;
#pragma GCC unroll 6
        for (int k = 0; k < M.columns; ++k) sum.add(M.at[p][k], in[k * in_step]);
        put(p, sum.value);
    }
#pragma GCC unroll 2
    for (int p : {1, 3}) {
        Sum even_odd[2];
#pragma GCC unroll 6
        for (int k = 0; k < M.columns; ++k) even_odd[k % 2].add(M.at[p][k], in[k * in_step]);
        put(p, even_odd[0].value + even_odd[1].value);
        put(p + 1, even_odd[0].value - even_odd[1].value);
    }
}

// out = M^T in
template <const auto& M>
[[gnu::always_inline]] inline void from_points(const Vec* in, int in_step, Vec* out, int out_step) {
    const Vec one = in[in_step], minus_one = in[2 * in_step], two = in[3 * in_step], minus_two = in[4 * in_step];
    const Vec ones[2] = {one + minus_one, one - minus_one}, twos[2] = {two + minus_two, two - minus_two};
#pragma GCC unroll 6
    for (int k = 0; k < M.columns; ++k) {
        Sum sum;
        sum.add(M.at[0][k], in[0]);
        sum.add(M.at[1][k], ones[k % 2]);
        sum.add(M.at[3][k], twos[k % 2]);
        sum.add(M.at[5][k], in[5 * in_step]);
        out[k * out_step] = sum.value;
    }
}

// M in M^T, from columns x columns to 6 x 6: each point goes to its matrix, at `offset`.
template <const auto& M>
[[gnu::always_inline]] inline void expand(const Vec* in, const Points& out, long offset) {
    constexpr int C = M.columns;
    Vec half[6 * C];
#pragma GCC unroll 6
    for (int j = 0; j < C; ++j)
        to_points<M>(in + j, C, [&](int p, Vec value) { half[p * C + j] = value; });
#pragma GCC unroll 6
    for (int i = 0; i < 6; ++i)
        to_points<M>(half + i * C, 1, [&](int p, Vec value) { vec(out[i * 6 + p] + offset) = value; });
}

// out = M^T in M, from 6 x 6 to columns x columns
template <const auto& M>
[[gnu::always_inline]] inline void reduce(const Vec* in, Vec* out) {
    constexpr int C = M.columns;
    Vec half[C * 6];
#pragma GCC unroll 6
    for (int j = 0; j < 6; ++j) from_points<M>(in + j, 6, half + j, 6);
#pragma GCC unroll 6
    for (int i = 0; i < C; ++i) from_points<M>(half + i * 6, 1, out + i * C, 1);
}

// Images as channels-last memory, cut into tiles of which the first begins `offset` pixels outside the corner.
struct Grid {
    int height, width, channels, offset, down, across;

    struct Corner {
        long image;
        int top, left;
    };
    Corner corner(int tile) const {
        const int at = tile % (down * across);
        return {tile / (down * across), at / across * TILE - offset, at % across * TILE - offset};
    }
    bool has(int y, int x) const { return y >= 0 && y < height && x >= 0 && x < width; }
    long pixel(Corner corner, int i, int j) const {
        return ((corner.image * height + corner.top + i) * width + corner.left + j) * channels;
    }
};

// Tiles to points: (tiles, channels) matrices.
template <const auto& M>
void gather(const float* images, const Grid& grid, int first, int count, const Points& out) {
    constexpr int S = M.columns;
    for (int t = 0; t < count; ++t) {
        const auto corner = grid.corner(first + t);
        for (int c = 0; c < grid.channels; c += LANES) {
            Vec in[S * S];
            for (int i = 0; i < S; ++i)
                for (int j = 0; j < S; ++j) {
                    const bool there = grid.has(corner.top + i, corner.left + j);
                    in[i * S + j] = there ? vec(images + grid.pixel(corner, i, j) + c) : Vec{};
                }
            expand<M>(in, out, (long)t * grid.channels + c);
        }
    }
}

// Points to tiles: the adjoint. Adds to the channels of a panel.
template <const auto& M>
void scatter(const Points& in, const Grid& grid, int first, int count, int panel, float* images) {
    constexpr int S = M.columns;
    for (int t = 0; t < count; ++t) {
        const auto corner = grid.corner(first + t);
        for (int c = 0; c < PANEL; c += LANES) {
            Vec values[POINTS], result[S * S];
            for (int e = 0; e < POINTS; ++e) values[e] = vec(in[e] + t * PANEL + c);
            reduce<M>(values, result);
            for (int i = 0; i < S; ++i)
                for (int j = 0; j < S; ++j)
                    if (grid.has(corner.top + i, corner.left + j))
                        vec(images + grid.pixel(corner, i, j) + panel + c) += result[i * S + j];
        }
    }
}

// Filters to points: (rows, panel) matrices from (rows, 3, 3, columns) filters.
void gather_filters(const float* filters, int rows, int columns, int panel, const Points& out) {
    for (int r = 0; r < rows; ++r)
        for (int c = 0; c < PANEL; c += LANES) {
            Vec in[9];
            for (int i = 0; i < 9; ++i) {
                const float* tap = filters + (r * 9L + i) * columns + panel + c;
                __builtin_prefetch(tap + 9L * columns);
                in[i] = vec(tap);
            }
            expand<FILTER>(in, out, r * PANEL + c);
        }
}

// Points to filters: the adjoint; added to what is there if `add`.
void scatter_filters(const Points& in, int rows, int columns, int panel, float* filters, bool add) {
    for (int r = 0; r < rows; ++r)
        for (int c = 0; c < PANEL; c += LANES) {
            Vec values[POINTS], result[9];
            for (int e = 0; e < POINTS; ++e) values[e] = vec(in[e] + r * PANEL + c);
            reduce<FILTER>(values, result);
            for (int i = 0; i < 9; ++i) {
                Vec& filter = vec(filters + (r * 9L + i) * columns + panel + c);
                filter = add ? filter + result[i] : result[i];
            }
        }
}

template <int... I>
[[gnu::always_inline]] inline void zip(Vec a, Vec b, Vec* out, std::integer_sequence<int, I...>) {
#ifdef __clang__
    out[0] = __builtin_shufflevector(a, b, (I / 2 + I % 2 * LANES)...);
    out[1] = __builtin_shufflevector(a, b, (LANES / 2 + I / 2 + I % 2 * LANES)...);
#else
    typedef int Index __attribute__((vector_size(4 * LANES)));
    out[0] = __builtin_shuffle(a, b, Index{(I / 2 + I % 2 * LANES)...});
    out[1] = __builtin_shuffle(a, b, Index{(LANES / 2 + I / 2 + I % 2 * LANES)...});
#endif
}

[[gnu::always_inline]] inline void transpose(Vec* rows) {
#pragma GCC unroll 4
    for (int stage = 1; stage < LANES; stage *= 2) {
        Vec zipped[LANES];
#pragma GCC unroll 16
        for (int i = 0; i < LANES / 2; ++i)
            zip(rows[i], rows[i + LANES / 2], zipped + 2 * i, std::make_integer_sequence<int, LANES>());
        std::copy(zipped, zipped + LANES, rows);
    }
}

// Filters to points, transposed: (count, panel) matrices of `count` columns from `first` on, the panel being of rows.
void gather_transposed(const float* filters, int columns, int panel, int first, int count, const Points& out) {
    for (int r = 0; r < PANEL; r += LANES)
        for (int c = 0; c < count; c += LANES) {
            Vec taps[9][LANES];
            for (int i = 0; i < 9; ++i) {
                for (int lane = 0; lane < LANES; ++lane) {
                    const float* tap = filters + ((panel + r + lane) * 9L + i) * columns + first + c;
                    __builtin_prefetch(tap + LANES);  // far apart: the processor doesn't see what comes next
                    taps[i][lane] = vec(tap);
                }
                transpose(taps[i]);
            }
            for (int lane = 0; lane < LANES; ++lane) {
                Vec in[9];
                for (int i = 0; i < 9; ++i) in[i] = taps[i][lane];
                expand<FILTER>(in, out, (c + lane) * PANEL + r);
            }
        }
}

// A matrix in memory, element (i, j) at i * row + j * column.
struct View {
    const float* data;
    long row, column;
};

template <int R>
void block(int depth, View a, const float* b, long b_row, float* out, bool add) {
    Vec sums[R][2] = {};
    if (add)
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
            sums[r][0] = vec(out + r * PANEL);
            sums[r][1] = vec(out + r * PANEL + LANES);
        }
    for (int k = 0; k < depth; ++k) {
        const Vec left = vec(b + k * b_row), right = vec(b + k * b_row + LANES);
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
            const float factor = a.data[r * a.row + k * a.column];
            sums[r][0] += factor * left;
            sums[r][1] += factor * right;
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
        vec(out + r * PANEL) = sums[r][0];
        vec(out + r * PANEL + LANES) = sums[r][1];
    }
}

template <int R>
void last_block(int rows, int depth, View a, const float* b, long b_row, float* out, bool add) {
    if constexpr (R > 0) {
        if (rows == R)
            block<R>(depth, a, b, b_row, out, add);
        else
            last_block<R - 1>(rows, depth, a, b, b_row, out, add);
    }
}

// out (rows, panel) = a (rows, depth) times b (depth, panel), added to what is there if `add`
void multiply(int rows, int depth, View a, const float* b, long b_row, float* out, bool add) {
    for (int column = 0; column < PANEL; column += 2 * LANES, b += 2 * LANES, out += 2 * LANES) {
        int r = 0;
        for (; r + ROWS <= rows; r += ROWS)
            block<ROWS>(depth, {a.data + r * a.row, a.row, a.column}, b, b_row, out + r * PANEL, add);
        last_block<ROWS - 1>(rows - r, depth, {a.data + r * a.row, a.row, a.column}, b, b_row, out + r * PANEL, add);
    }
}

struct Shape {
    Grid in, out;
    int tiles, chunk;

    Shape(int n, int height, int width, int c, int k, int padding) {
        const int y = height + 2 * padding - 2, x = width + 2 * padding - 2;
        const int down = (y + TILE - 1) / TILE, across = (x + TILE - 1) / TILE;
        in = {height, width, c, padding, down, across};
        out = {y, x, k, 0, down, across};
        tiles = n * down * across;
        chunk = std::min({tiles, MOST_TILES, std::max(MOST_NUMBERS / std::max(c, k), 1)});
    }
};

}  // namespace

// x: (n, height, width, c); w: (k, 3, 3, c); y: (n, height + 2 padding - 2, width + 2 padding - 2, k).
// c and k: multiples of PANEL.
extern "C" void convolve(const float* x, const float* w, float* y, int n, int height, int width, int c, int k,
                         int padding) {
    const Shape shape(n, height, width, c, k, padding);
    const Points v((long)shape.chunk * c), u(DEPTH * PANEL), m(shape.chunk * PANEL);
    std::fill_n(y, (long)n * shape.out.height * shape.out.width * k, 0.f);
    for (int first = 0; first < shape.tiles; first += shape.chunk) {
        const int count = std::min(shape.chunk, shape.tiles - first);
        gather<INPUT>(x, shape.in, first, count, v);
        for (int panel = 0; panel < k; panel += PANEL) {
            for (int from = 0; from < c; from += DEPTH) {
                const int depth = std::min(DEPTH, c - from);
                gather_transposed(w, c, panel, from, depth, u);
                for (int e = 0; e < POINTS; ++e)
                    multiply(count, depth, {v[e] + from, c, 1}, u[e], PANEL, m[e], from > 0);
            }
            scatter<OUTPUT>(m, shape.out, first, count, panel, y);
        }
    }
}

// dy: as y; dx: as x, or null where it isn't wanted; dw: as w, or null.
extern "C" void convolve_backward(const float* dy, const float* x, const float* w, float* dx, float* dw, int n,
                                  int height, int width, int c, int k, int padding) {
    const Shape shape(n, height, width, c, k, padding);
    const Points q((long)shape.chunk * k), u(DEPTH * PANEL), p(shape.chunk * PANEL), v(dw ? (long)shape.chunk * c : 0);
    if (dx) std::fill_n(dx, (long)n * height * width * c, 0.f);
    for (int first = 0; first < shape.tiles; first += shape.chunk) {
        const int count = std::min(shape.chunk, shape.tiles - first);
        gather<OUTPUT>(dy, shape.out, first, count, q);
        if (dw) gather<INPUT>(x, shape.in, first, count, v);
        for (int panel = 0; panel < c; panel += PANEL) {
            for (int from = 0; from < k; from += DEPTH) {
                const int depth = std::min(DEPTH, k - from);
                if (dx) {
                    gather_filters(w + from * 9L * c, depth, c, panel, u);
                    for (int e = 0; e < POINTS; ++e)
                        multiply(count, depth, {q[e] + from, k, 1}, u[e], PANEL, p[e], from > 0);
                }
                if (dw) {
                    for (int e = 0; e < POINTS; ++e)
                        multiply(depth, count, {q[e] + from, 1, k}, v[e] + panel, c, u[e], false);
                    scatter_filters(u, depth, c, panel, dw + from * 9L * c, first > 0);
                }
            }
            if (dx) scatter<INPUT>(p, shape.in, first, count, panel, dx);
        }
    }
}
