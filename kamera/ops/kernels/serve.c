/* The fused operator for CPUs: every value is read once and written once.
 *
 * Blocks of a few tokens are widened (or decoded) to float in the first-level cache, get U V^T added in
 * registers, are turned, and are rounded into the target. Built on the machine it runs on (native.py),
 * without contracting a * b - c * d: a turn then gives the bits that torch's own operations give.
 */
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__))
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define WIDTH 16
#define COLUMNS 4
#define FMA(a, b, c) ((vec)_mm512_fmadd_ps((__m512)(a), (__m512)(b), (__m512)(c)))
#elif defined(__AVX2__) && defined(__FMA__)
#define WIDTH 8
#define COLUMNS 2
#define FMA(a, b, c) ((vec)_mm256_fmadd_ps((__m256)(a), (__m256)(b), (__m256)(c)))
#else
#define WIDTH 4
#define COLUMNS 2
#define FMA(a, b, c) ((a) * (b) + (c))
#endif
#define ROWS 16       /* tokens of a block in the cache */
#define BLOCKS 8      /* blocks of a unit of work */
#define MAX_THREADS 64
/* source, steps, lows, target, left [tokens, rank] in float, right [heads * dim, rank], rank, entries from one row
   of either factor to the next, kind of right */
#define LINE 9

typedef float vec __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));

enum kind { F32, BF16, F16, CODES8, CODES4 };

/* All int64, so that no padding hides between what Python fills in (native.py, Launch). */
struct launch {
    int64_t table;                         /* lines of LINE int64, see there */
    int64_t lines, heads, tokens, dim;
    int64_t start, pairs, interleaved;     /* pairs 0: nothing turns */
    int64_t cos, sin;
    int64_t source_kind, target_kind;
    int64_t s_head, s_token, y_head, y_token;
    int64_t g_head, g_token;               /* strides of steps and lows, whose features are adjacent */
    int64_t token_group, feature_group;    /* values that share a step; 0: all along the axis */
    int64_t largest;                       /* address of the largest float a decoded value may have */
};

static int64_t size_of(int64_t kind) { return kind == F32 ? 4 : kind < CODES8 ? 2 : 1; }

struct share {
    const struct launch *job;
    int64_t first, last;
    int failed;
};

/* Entry j of a row of floats of some kind; the kind is known where these are inlined. */
static inline __attribute__((always_inline)) float get(const void *x, int kind, int64_t j)
{
    if (kind == F32) return ((const float *)x)[j];
#ifdef __FLT16_MAX__
    if (kind == F16) return (float)((const _Float16 *)x)[j];
#endif
    const uint32_t bits = (uint32_t)((const uint16_t *)x)[j] << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static void widen(const struct launch *l, const int64_t *line, int64_t head, int64_t token, float *restrict x)
{
    const int64_t dim = l->dim, at = head * l->s_head + token * l->s_token;
    if (l->source_kind == F32) {
        memcpy(x, (const float *)line[0] + at, 4 * dim);
    } else if (l->source_kind == BF16) {
        for (int64_t j = 0; j < dim; j++) x[j] = get((const uint16_t *)line[0] + at, BF16, j);
    } else if (l->source_kind == F16) {
        for (int64_t j = 0; j < dim; j++) x[j] = get((const uint16_t *)line[0] + at, F16, j);
    } else {
        const int64_t row = l->source_kind == CODES4 ? token / 2 : token;
        const uint8_t *restrict s = (const uint8_t *)line[0] + head * l->s_head + row * l->s_token;
        if (l->source_kind == CODES8) {
            for (int64_t j = 0; j < dim; j++) x[j] = (float)s[j];
        } else {
            const int shift = 4 * (int)(token % 2);
            for (int64_t j = 0; j < dim; j++) x[j] = (float)((s[j] >> shift) & 15);
        }
        const int64_t group = l->token_group ? token / l->token_group : 0;
        const float *restrict step = (const float *)line[1] + head * l->g_head + group * l->g_token;
        const float *restrict low = (const float *)line[2] + head * l->g_head + group * l->g_token;
        const float most = *(const float *)l->largest;
        if (l->feature_group == 1) {
            for (int64_t j = 0; j < dim; j++) x[j] = x[j] * step[j] + low[j];
        } else {
            const int64_t length = l->feature_group ? l->feature_group : dim;
            for (int64_t j = 0, g = 0; j < dim; j += length, g++) {
                const int64_t stop = j + length < dim ? j + length : dim;
                for (int64_t k = j; k < stop; k++) x[k] = x[k] * step[g] + low[g];
            }
        }
        for (int64_t j = 0; j < dim; j++) x[j] = x[j] > most ? most : x[j] < -most ? -most : x[j];
    }
}

/* A head's rows of the right factor, as v[rank, dim]. */
static void transpose(const int64_t *line, int64_t head, int64_t dim, float *restrict v)
{
    const int64_t rank = line[6], columns = line[7], kind = line[8];
#define CASE(KIND)                                                                                           \
    if (kind == KIND)                                                                                        \
        for (int64_t j = 0; j < dim; j++)                                                                    \
            for (int64_t r = 0; r < rank; r++)                                                               \
                v[r * dim + j] = get((const void *)line[5], KIND, (head * dim + j) * columns + r);
    CASE(F32) CASE(BF16) CASE(F16)
#undef CASE
}

/* x[rows, dim] += u[rows, rank] v[rank, dim], in registers. */
#define PATCH_ROWS(N)                                                                                        \
    static void patch_##N(float *x, int64_t dim, const float *u, int64_t columns, const float *v, int64_t rank)\
    {                                                                                                        \
        vec a[N][COLUMNS];                                                                                   \
        for (int i = 0; i < N; i++)                                                                          \
            for (int c = 0; c < COLUMNS; c++) a[i][c] = *(const vec *)(x + i * dim + c * WIDTH);             \
        for (int64_t r = 0; r < rank; r++) {                                                                 \
            vec b[COLUMNS];                                                                                  \
            for (int c = 0; c < COLUMNS; c++) b[c] = *(const vec *)(v + r * dim + c * WIDTH);              \
            for (int i = 0; i < N; i++)                                                                      \
                for (int c = 0; c < COLUMNS; c++) a[i][c] = FMA(b[c], (vec){0} + u[i * columns + r], a[i][c]); \
        }                                                                                                    \
        for (int i = 0; i < N; i++)                                                                          \
            for (int c = 0; c < COLUMNS; c++) *(vec *)(x + i * dim + c * WIDTH) = a[i][c];                   \
    }
PATCH_ROWS(4)
PATCH_ROWS(1)

static void patch(
    float *x, int64_t rows, int64_t dim, const float *u, int64_t columns, const float *v, int64_t rank)
{
    int64_t j = 0;
    for (; j + COLUMNS * WIDTH <= dim; j += COLUMNS * WIDTH) {
        int64_t i = 0;
        for (; i + 4 <= rows; i += 4) patch_4(x + i * dim + j, dim, u + i * columns, columns, v + j, rank);
        for (; i < rows; i++) patch_1(x + i * dim + j, dim, u + i * columns, columns, v + j, rank);
    }
    for (int64_t i = 0; i < rows && j < dim; i++)
        for (int64_t r = 0; r < rank; r++) {
            const float s = u[i * columns + r];
            for (int64_t k = j; k < dim; k++) x[i * dim + k] += s * v[r * dim + k];
        }
}

static inline __attribute__((always_inline)) void put(void *y, int kind, int64_t j, float value)
{
    if (kind == F32) {
        ((float *)y)[j] = value;
        return;
    }
#ifdef __FLT16_MAX__
    if (kind == F16) {
        ((_Float16 *)y)[j] = (_Float16)value;
        return;
    }
#endif
    uint32_t bits; /* to the nearest, ties to even; what is no number stays none */
    memcpy(&bits, &value, 4);
    const uint32_t near = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    ((uint16_t *)y)[j] = (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : near);
}

/* One row, turned and rounded. */
static inline __attribute__((always_inline)) void emit_as(
    const struct launch *l, const void *restrict x, int from, void *restrict y, int to)
{
    const float *restrict c = (const float *)l->cos, *restrict s = (const float *)l->sin;
    const int64_t pairs = l->pairs, start = l->start, stop = start + 2 * pairs, dim = l->dim;
    for (int64_t j = 0; j < start; j++) put(y, to, j, get(x, from, j));
    if (l->interleaved) {
        for (int64_t j = 0; j < pairs; j++) {
            const float a = get(x, from, start + 2 * j), b = get(x, from, start + 2 * j + 1);
            put(y, to, start + 2 * j, a * c[j] - b * s[j]);
            put(y, to, start + 2 * j + 1, b * c[j] + a * s[j]);
        }
    } else {
        for (int64_t j = 0; j < pairs; j++) {
            const float a = get(x, from, start + j), b = get(x, from, start + pairs + j);
            put(y, to, start + j, a * c[j] - b * s[j]);
            put(y, to, start + pairs + j, b * c[j] + a * s[j]);
        }
    }
    for (int64_t j = stop; j < dim; j++) put(y, to, j, get(x, from, j));
}

static void emit(const struct launch *l, const void *x, int from, void *y)
{
    const int to = (int)l->target_kind;
#define CASE(FROM, TO) if (from == FROM && to == TO) { emit_as(l, x, FROM, y, TO); return; }
    CASE(F32, F32) CASE(F32, BF16) CASE(F32, F16)
    CASE(BF16, F32) CASE(BF16, BF16) CASE(BF16, F16)
    CASE(F16, F32) CASE(F16, BF16) CASE(F16, F16)
#undef CASE
}

static void *work(void *given)
{
    struct share *share = given;
    const struct launch *l = share->job;
    const int64_t unit = ROWS * BLOCKS, units = (l->tokens + unit - 1) / unit;
    int64_t most = 0, of_v = -1;
    for (int64_t i = 0; i < l->lines; i++) {
        const int64_t rank = ((const int64_t *)l->table)[LINE * i + 6];
        most = rank > most ? rank : most;
    }
    void *scratch;
    if (posix_memalign(&scratch, 64, sizeof(float) * (ROWS + most) * (l->dim + 1))) {
        share->failed = 1;
        return NULL;
    }
    float *x = scratch, *v = x + ROWS * l->dim;
    for (int64_t n = share->first; n < share->last; n++) {
        const int64_t *line = (const int64_t *)l->table + LINE * (n / (units * l->heads));
        const int64_t head = n / units % l->heads, begin = n % units * unit, rank = line[6];
        const int direct = rank == 0 && l->source_kind < CODES8; /* nothing to do but turn and round */
        const int64_t end = begin + unit < l->tokens ? begin + unit : l->tokens;
        if (rank && of_v != n / units) {
            transpose(line, head, l->dim, v);
            of_v = n / units;
        }
        for (int64_t t = begin; t < end; t += ROWS) {
            const int64_t rows = end - t < ROWS ? end - t : ROWS;
            for (int64_t i = 0; i < rows && !direct; i++) widen(l, line, head, t + i, x + i * l->dim);
            if (rank)
                patch(x, rows, l->dim, (const float *)line[4] + t * line[7], line[7], v, rank);
            for (int64_t i = 0; i < rows; i++) {
                char *y = (char *)line[3] + size_of(l->target_kind) * (head * l->y_head + (t + i) * l->y_token);
                const char *given = (const char *)line[0]
                    + size_of(l->source_kind) * (head * l->s_head + (t + i) * l->s_token);
                emit(l, direct ? given : (const char *)(x + i * l->dim), direct ? (int)l->source_kind : F32, y);
            }
        }
    }
    free(x);
    return NULL;
}

/* Whether half precision (float16) was built in. */
int kamera_half(void)
{
#ifdef __FLT16_MAX__
    return 1;
#else
    return 0;
#endif
}

/* Returns 0, or 1 when memory ran out (the target is then half written). */
int kamera_serve(const struct launch *l, int64_t threads)
{
    const int64_t unit = ROWS * BLOCKS, total = l->lines * l->heads * ((l->tokens + unit - 1) / unit);
    struct share shares[MAX_THREADS];
    pthread_t ids[MAX_THREADS];
    int started[MAX_THREADS] = {0}, failed = 0;
    if (threads > MAX_THREADS) threads = MAX_THREADS;
    if (threads > total) threads = total;
    if (threads < 1) threads = 1;
    for (int64_t i = 0; i < threads; i++) {
        shares[i] = (struct share){l, total * i / threads, total * (i + 1) / threads, 0};
        if (i) started[i] = pthread_create(&ids[i], NULL, work, &shares[i]) == 0;
    }
    work(&shares[0]);
    for (int64_t i = 1; i < threads; i++) {
        if (started[i]) pthread_join(ids[i], NULL);
        else work(&shares[i]);
    }
    for (int64_t i = 0; i < threads; i++) failed |= shares[i].failed;
    return failed;
}
