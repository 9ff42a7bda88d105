/* The routed activation on a CPU. `library.py` compiles this file with the machine's C compiler at first use, and
   `routed.py` calls `sweep`.

   A sweep reads a tensor once, in tiles that stay in the first-level cache. For every candidate it evaluates a pair of
   functions: the value and the slope, or the second and the third derivative. It adds one of the pair to a weighted
   sum, and the other to the sums that the policy or the gradient of the logits needs.

   Accuracy: a function f has an error of at most 8 * 2^-24 (|f(h)| + |h f'(h)|), that of four units in the last place
   of its value and of h; a third derivative twice that. Results below 1e-32 may be rounded to 0. In particular GELU is
   accurate to 1e-6 of its value at h = -6, where torch's float32 GELU has lost all digits.

   Comparisons are written so that NaN propagates. Sums are added up per chunk, and the chunks in their order, so that
   they do not depend on the number of threads. */

#if defined(__clang__) && defined(_OPENMP)
#error "clang's OpenMP runtime aborts the process if torch has loaded another copy of it"
#endif

#include <stdlib.h>

#include "elementary.h"

#define TILE 512
#define CHUNK (64 * TILE)
#define MOST 16 /* candidates of a site */

/* In the order of FUNCTIONS in routed.py. The pairs of GIVEN come from arrays, those of GENERATED from other code. */
enum {
    GIVEN, RELU, LEAKY_RELU, SIGMOID, TANH, IDENTITY, GELU, SILU, MISH, ELU, SELU, SOFTPLUS, HARDSWISH, RELU6, SOFTSIGN,
    RELU_SQUARED, SINE, GELU_TANH, GENERATED
};

#define LEAK 0.01f
#define SELU_SCALE 1.0507009873554805f
#define SELU_ALPHA 1.6732632423543772f
#define GAUSSIAN 0.3989422804014327f /* 1 / sqrt(2 pi) */
#define CUBIC 0.044715f

/* log(1 + e) for 0 <= e <= 1, by the series of 2 artanh(e / (2 + e)). */
static inline float log_of_one_plus(float e) {
    const float z = e / (2.0f + e), q = z * z;
    float p = 1.0f / 13;
    p = p * q + 1.0f / 11;
    p = p * q + 1.0f / 9;
    p = p * q + 1.0f / 7;
    p = p * q + 1.0f / 5;
    p = p * q + 1.0f / 3;
    return 2.0f * (p * q * z + z);
}

/* The standard normal distribution function, from bell = exp(-h^2 / 2). In the tail it is bell times a polynomial in
   1 / (1 + 0.3 |h|), fitted up to |h| = 13.3, where bell vanishes; its relative error is at most 1.3e-7. */
static inline float normal(float h, float bell) {
    const float t = 1.0f / (0.3f * fabsf(h) + 1.0f);
    float p = 0.0360362269f;
    p = p * t - 0.158713326f;
    p = p * t + 0.208964124f;
    p = p * t - 0.0560954846f;
    p = p * t + 0.12984322f;
    p = p * t + 0.0995231196f;
    p = p * t + 0.120816886f;
    p = p * t + 0.119625166f;
    const float tail = p * t * bell;
    return h < 0 ? tail : 1.0f - tail;
}

/* s = sigmoid(h), 1 - s, 1 - 2s and s (1 - s), each without cancellation. Like the next two, it takes e = exp(-|h|) or
   m = exp(-|h|) - 1, which cannot overflow. */
typedef struct {
    float s, rest, odd, slope;
} Sigmoid;

static inline Sigmoid sigmoid(float h, float e, float m) {
    const float r = 1.0f / (1.0f + e), small = e * r;
    return (Sigmoid){h < 0 ? small : r, h < 0 ? r : small, copysignf(m * r, -h), small * r};
}

/* A value t and 1 - t^2, without cancellation. */
typedef struct {
    float t, slope;
} Bounded;

static inline Bounded tanh_of(float h, float e, float m) {
    const float both = m * (m + 2.0f), r = 1.0f / (both + 2.0f); /* both = exp(-2 |h|) - 1 */
    return (Bounded){copysignf(both * r, h), 4.0f * (e * r) * (e * r)};
}

static inline Bounded tanh_of_softplus(float h, float e) {
    const float n = h < 0 ? e * (e + 2.0f) : 2.0f * e + 1.0f, d = h < 0 ? 1.0f : e * e, r = 1.0f / (2.0f * d + n);
    return (Bounded){n * r, 4.0f * d * (n + d) * r * r};
}

/* The sines and cosines of h. Large numbers are left to libm. */
static void sines(int size, const float *restrict h, float *restrict sine, float *restrict cosine) {
    int large = 0;
    for (int i = 0; i < size; i++) {
        sine_of(h[i], &sine[i], &cosine[i]);
        large |= !(fabsf(h[i]) < 1e5f);
    }
    for (int i = 0; large && i < size; i++)
        if (!(fabsf(h[i]) < 1e5f)) sine[i] = sinf(h[i]), cosine[i] = cosf(h[i]);
}

/* For the tanh approximation of GELU, h sigmoid(v): the sigmoid and the derivatives of v. Beyond 100 the derivatives of
   the candidate are constant, and a power of h could overflow. */
typedef struct {
    float h, v1, v2, v3;
    Sigmoid of;
} Approximation;

static inline Approximation approximation(float h) {
    const float near = h < -100.0f ? -100.0f : h > 100.0f ? 100.0f : h, c = 1.5957691216057308f; /* sqrt(8 / pi) */
    const float v = c * (CUBIC * near * near * near + near);
    const Exp x = exp_of_negative(-fabsf(v));
    return (Approximation){near, c * (3 * CUBIC * near * near + 1.0f), 6 * c * CUBIC * near, 6 * c * CUBIC,
                           sigmoid(v, x.exp, x.less_one)};
}

/* A tile of the input and what several candidates compute from it. */
typedef struct {
    float h[TILE], e[TILE], m[TILE], bell[TILE]; /* e = exp(-|h|), m = e - 1, bell = exp(-h^2 / 2) */
} Tile;

/* Run statements for every element of a tile. They set `first` and `second` from h, e, m and bell. */
#define EACH(...)                                                                              \
    for (int i = 0; i < size; i++) {                                                           \
        const float h = tile->h[i], e = tile->e[i], m = tile->m[i], bell = tile->bell[i];      \
        float first, second;                                                                   \
        __VA_ARGS__;                                                                           \
        firsts[i] = first, seconds[i] = second;                                                \
        (void)h, (void)e, (void)m, (void)bell;                                                 \
    }                                                                                          \
    break

static void value_and_slope(int function, int size, const Tile *restrict tile, float *restrict firsts,
                            float *restrict seconds) {
    switch (function) {
    case RELU: EACH(first = h < 0 ? 0 : h; second = h <= 0 ? 0 : 1);
    case LEAKY_RELU: EACH(second = h > 0 ? 1 : LEAK; first = h * second);
    case SIGMOID: EACH(const Sigmoid a = sigmoid(h, e, m); first = a.s; second = a.slope);
    case TANH: EACH(const Bounded a = tanh_of(h, e, m); first = a.t; second = a.slope);
    case IDENTITY: EACH(first = h; second = 1);
    case GELU: EACH(const float c = normal(h, bell); first = h * c; second = GAUSSIAN * h * bell + c);
    case SILU: EACH(const Sigmoid a = sigmoid(h, e, m); first = h * a.s; second = first * a.rest + a.s);
    case MISH: EACH(const Bounded a = tanh_of_softplus(h, e); first = h * a.t;
                    second = h * sigmoid(h, e, m).s * a.slope + a.t);
    case ELU: EACH(first = h > 0 ? h : m; second = h > 0 ? 1 : e);
    case SELU: EACH(first = SELU_SCALE * (h > 0 ? h : SELU_ALPHA * m);
                    second = SELU_SCALE * (h > 0 ? 1 : SELU_ALPHA * e));
    case SOFTPLUS: EACH(first = (h < 0 ? 0 : h) + log_of_one_plus(e); second = sigmoid(h, e, m).s);
    case HARDSWISH: EACH(const float r = h + 3; first = h * (r < 0 ? 0 : r > 6 ? 1 : r / 6);
                         second = h <= -3 ? 0 : h >= 3 ? 1 : h / 3 + 0.5f);
    case RELU6: EACH(first = h < 0 ? 0 : h > 6 ? 6 : h; second = h <= 0 || h >= 6 ? 0 : 1);
    case SOFTSIGN: EACH(const float d = 1 + fabsf(h), r = 1 / d; first = h / d; second = r * r);
    case RELU_SQUARED: EACH(const float r = h < 0 ? 0 : h; first = r * r; second = 2 * r);
    case SINE: sines(size, tile->h, firsts, seconds); break;
    case GELU_TANH: EACH(const Approximation a = approximation(h); first = h * a.of.s;
                         second = a.h * a.of.slope * a.v1 + a.of.s);
    }
}

/* The formulas of derivatives.py. */
static void second_and_third(int function, int size, const Tile *restrict tile, float *restrict firsts,
                             float *restrict seconds) {
    switch (function) {
    case SIGMOID: EACH(const Sigmoid a = sigmoid(h, e, m); first = a.slope * a.odd;
                       second = a.slope * (1 - 6 * a.slope));
    case TANH: EACH(const Bounded a = tanh_of(h, e, m); first = -2 * a.t * a.slope;
                    second = a.slope * (4 - 6 * a.slope));
    case GELU: EACH(const float q = bell == 0 ? 0 : h * h, b = GAUSSIAN * bell; first = b * (2 - q);
                    second = b * h * (q - 4));
    case SILU: EACH(const Sigmoid a = sigmoid(h, e, m); const float p = h * a.odd; first = a.slope * (p + 2);
                    second = a.slope * (a.odd * (p + 3) - 2 * (h * a.slope)));
    case MISH: EACH(const Sigmoid a = sigmoid(h, e, m); const Bounded g = tanh_of_softplus(h, e);
                    const float s = a.s, s1 = a.slope, s2 = s1 * a.odd, q = g.slope, g1 = q * s, q1 = -2 * g.t * g1;
                    const float g2 = q1 * s + q * s1, q2 = -2 * (g1 * g1 + g.t * g2);
                    first = h * g2 + 2 * g1; second = h * (q2 * s + 2 * q1 * s1 + q * s2) + 3 * g2);
    case ELU: EACH(first = h < 0 ? e : 0; second = first);
    case SELU: EACH(first = h < 0 ? SELU_SCALE * SELU_ALPHA * e : 0; second = first);
    case SOFTPLUS: EACH(const Sigmoid a = sigmoid(h, e, m); first = a.slope; second = a.slope * a.odd);
    case HARDSWISH: EACH(first = h > -3 && h < 3 ? 1.0f / 3 : 0; second = 0);
    case SOFTSIGN: EACH(const float r = 1 / (1 + fabsf(h)), c = r * r * r; first = h == 0 ? 0 : copysignf(2 * c, -h);
                        second = 6 * c * r);
    case RELU_SQUARED: EACH(first = h > 0 ? 2 : 0; second = 0);
    case SINE:
        sines(size, tile->h, firsts, seconds);
        for (int i = 0; i < size; i++) firsts[i] = -firsts[i], seconds[i] = -seconds[i];
        break;
    case GELU_TANH: EACH(const Approximation a = approximation(h); const float odd = a.of.odd, d = a.of.slope;
                         const float v11 = a.v1 * a.v1, s2 = odd * v11 + a.v2;
                         first = d * (a.h * s2 + 2 * a.v1);
                         second = d * (a.h * ((1 - 6 * d) * v11 * a.v1 + 3 * odd * a.v1 * a.v2 + a.v3) + 3 * s2));
    default: EACH(first = 0; second = 0); /* piecewise linear */
    }
}

/* Write the value and the slope of each input. */
typedef void Generated(int size, const float *restrict inputs, float *restrict values, float *restrict slopes);

/* The candidates of a sweep that are not dropped, and which one of each pair is blended and which one is summed. */
typedef struct {
    int32_t count;
    int32_t functions[MOST];
    int32_t columns[MOST]; /* the columns of the candidates in the tables of weights and sums */
    int32_t higher;        /* whether the pairs are the second and the third derivative */
    int32_t blended;       /* 0 or 1 */
    int32_t summed;        /* 0 or 1; -1 for no sums */
    int32_t shares_e, shares_bell; /* whether a candidate needs these parts of a tile */
    Generated *generated[MOST];    /* the code of each GENERATED candidate */
} Plan;

typedef struct {
    const float *h, *weights;
    const float *deltas[3];    /* the upstream gradients of the value, the slope and the second derivative, or NULL */
    const float *const *given; /* the pair of each GIVEN candidate */
    float *out;
} Arrays;

static void load(Tile *restrict tile, const Plan *plan, const float *restrict h, int size) {
    memcpy(tile->h, h, size * sizeof(float));
    if (plan->shares_e)
        for (int i = 0; i < size; i++) {
            const Exp x = exp_of_negative(-fabsf(tile->h[i]));
            tile->e[i] = x.exp, tile->m[i] = x.less_one;
        }
    if (plan->shares_bell)
        for (int i = 0; i < size; i++) tile->bell[i] = exp_of_negative(-0.5f * tile->h[i] * tile->h[i]).exp;
}

/* Four accumulators each, because the additions to one of them have to wait for each other. */
#define SUM(ITEM)                                                                     \
    const int quarter = size / 4;                                                     \
    float first = 0, second = 0, third = 0, fourth = 0;                               \
    _Pragma("omp simd reduction(+ : first, second, third, fourth)")                   \
    for (int i = 0; i < quarter; i++) {                                               \
        first += ITEM(i), second += ITEM(i + quarter);                                \
        third += ITEM(i + 2 * quarter), fourth += ITEM(i + 3 * quarter);              \
    }                                                                                 \
    double sum = (double)first + second + third + fourth;                             \
    for (int i = 4 * quarter; i < size; i++) sum += ITEM(i);                          \
    return sum

static double sum_of_products(const float *restrict a, const float *restrict b, int size) {
#define PRODUCT(i) a[i] * b[i]
    SUM(PRODUCT);
}

static double sum_of_sizes(const float *restrict a, int size) {
#define SIZE(i) fabsf(a[i])
    SUM(SIZE);
}

static void sweep_chunk(const Plan *plan, const Arrays *arrays, int64_t start, int64_t end, double *sums) {
    Tile tile;
    float firsts[TILE], seconds[TILE], blend[TILE];
    for (int64_t at = start; at < end; at += TILE) {
        const int size = end - at < TILE ? (int)(end - at) : TILE;
        const float *delta = arrays->deltas[0] ? arrays->deltas[0] + at : NULL;
        load(&tile, plan, arrays->h + at, size);
        for (int i = 0; i < size; i++) blend[i] = 0;
        for (int k = 0; k < plan->count; k++) {
            const float weight = arrays->weights[plan->columns[k]];
            const float *pair[2] = {firsts, seconds};
            if (plan->functions[k] == GIVEN)
                pair[0] = arrays->given[2 * k] + at, pair[1] = arrays->given[2 * k + 1] + at;
            else if (plan->summed < 0 && weight == 0)
                continue;
            else if (plan->functions[k] == GENERATED)
                plan->generated[k](size, tile.h, firsts, seconds);
            else
                (plan->higher ? second_and_third : value_and_slope)(plan->functions[k], size, &tile, firsts, seconds);
            if (weight != 0) { /* a zero weight masks infinite values */
                const float *restrict term = pair[plan->blended];
                for (int i = 0; i < size; i++) blend[i] = weight * term[i] + blend[i];
            }
            if (plan->summed >= 0)
                sums[k] += delta ? sum_of_products(pair[plan->summed], delta, size)
                                 : sum_of_sizes(pair[plan->summed], size);
        }
        float *restrict out = arrays->out + at;
        if (delta)
            for (int i = 0; i < size; i++) out[i] = blend[i] * delta[i];
        else
            memcpy(out, blend, size * sizeof(float));
    }
}

/* As `sweep_chunk`, for `gradients`. */
static void gradients_chunk(const Plan *plan, const Arrays *arrays, int64_t start, int64_t end, double *sums) {
    Tile tile;
    float orders[4][TILE], blends[3][TILE];
    const int low = arrays->deltas[0] || arrays->deltas[1], high = arrays->deltas[1] || arrays->deltas[2];
    for (int64_t at = start; at < end; at += TILE) {
        const int size = end - at < TILE ? (int)(end - at) : TILE;
        load(&tile, plan, arrays->h + at, size);
        memset(blends, 0, sizeof blends);
        for (int k = 0; k < plan->count; k++) {
            const float weight = arrays->weights[plan->columns[k]];
            if (plan->summed < 0 && weight == 0) continue;
            if (low) value_and_slope(plan->functions[k], size, &tile, orders[0], orders[1]);
            if (high) second_and_third(plan->functions[k], size, &tile, orders[2], orders[3]);
            for (int n = 0; n < 3; n++) {
                if (!arrays->deltas[n]) continue;
                if (plan->summed >= 0) sums[k] += sum_of_products(orders[n], arrays->deltas[n] + at, size);
                if (weight != 0)
                    for (int i = 0; i < size; i++) blends[n][i] = weight * orders[n + 1][i] + blends[n][i];
            }
        }
        float *restrict out = arrays->out + at;
        memset(out, 0, size * sizeof(float));
        for (int n = 0; n < 3; n++)
            if (arrays->deltas[n])
                for (int i = 0; i < size; i++) out[i] = blends[n][i] * arrays->deltas[n][at + i] + out[i];
    }
}

typedef void RunChunk(const Plan *plan, const Arrays *arrays, int64_t start, int64_t end, double *sums);

static int run(RunChunk *run_chunk, const Plan *plan, const Arrays *arrays, double *sums, int64_t size, int threads) {
    const int64_t chunks = (size + CHUNK - 1) / CHUNK;
    double few[4][MOST];
    double(*own)[MOST] = chunks > 4 ? malloc(chunks * sizeof *own) : few;
    if (!own) return 1;
    memset(own, 0, chunks * sizeof *own);
#pragma omp parallel for num_threads(threads) if (threads > 1 && chunks > 1)
    for (int64_t chunk = 0; chunk < chunks; chunk++) {
        const int64_t start = chunk * CHUNK, end = start + CHUNK < size ? start + CHUNK : size;
        run_chunk(plan, arrays, start, end, own[chunk]);
    }
    if (plan->summed >= 0)
        for (int64_t chunk = 0; chunk < chunks; chunk++)
            for (int k = 0; k < plan->count; k++) sums[plan->columns[k]] += own[chunk][k];
    if (own != few) free(own);
    return 0;
}

/* Write the blend to `out`, multiplied by delta if there is one, and add to `sums`, by column, the inner products with
   delta, or the sums of the sizes without it. Return 0, or 1 if there is no memory. */
int sweep(const Plan *plan, const float *h, const float *delta, const float *weights, const float *const *given,
          float *out, double *sums, int64_t size, int threads) {
    const Arrays arrays = {h, weights, {delta}, given, out};
    return run(sweep_chunk, plan, &arrays, sums, size, threads);
}

/* Write sum_n delta_n B_{n+1} to `out`, where B_n is the blend of the n-th derivatives and a delta may be NULL, and add
   to `sums`, by column, the inner products of the deltas with the derivatives. Return 0, or 1 if there is no memory. */
int gradients(const Plan *plan, const float *h, const float *delta_0, const float *delta_1, const float *delta_2,
              const float *weights, float *out, double *sums, int64_t size, int threads) {
    const Arrays arrays = {h, weights, {delta_0, delta_1, delta_2}, NULL, out};
    return run(gradients_chunk, plan, &arrays, sums, size, threads);
}

/* Write sums / size, the mean sensitivities. */
void means(const double *sums, int64_t size, int count, float *out) {
    for (int k = 0; k < count; k++) out[k] = (float)(sums[k] / (double)size);
}

/* Write the gradient of Proposition 1 from the inner products: p_k / tau sum_j p_j (inner_k - inner_j). */
void logit_gradient(const double *inner, const float *p, const float *temperature, int count, float *out) {
    for (int k = 0; k < count; k++) {
        double centred = 0;
        for (int j = 0; j < count; j++)
            if (p[j] != 0) centred += p[j] * (inner[k] - inner[j]);
        out[k] = p[k] == 0 ? 0 : (float)(p[k] * centred / *temperature);
    }
}
