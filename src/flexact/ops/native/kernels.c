/* The routed activation on a CPU. `library.py` compiles this file with the machine's C compiler at first use, and
   `routed.py` calls `sweep`.

   A sweep reads a tensor once, in tiles that stay in the first-level cache. For every candidate it evaluates a pair of
   functions: the value and the slope, or the second and the third derivative. It adds one of the pair to a weighted
   sum, and the other to the sums that the policy or the gradient of the logits needs.

   Comparisons are written so that NaN propagates. Sums are added up per chunk, and the chunks in their order, so that
   they do not depend on the number of threads. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define TILE 512
#define CHUNK (64 * TILE)
#define MOST 16 /* candidates of a site */

/* In the order of FUNCTIONS in routed.py. The pairs of GIVEN come from arrays. */
enum {
    GIVEN, RELU, LEAKY_RELU, SIGMOID, TANH, IDENTITY, GELU, SILU, MISH, ELU, SELU, SOFTPLUS, HARDSWISH, RELU6, SOFTSIGN,
    RELU_SQUARED, SINE, GELU_TANH
};

#define LEAK 0.01f
#define SELU_SCALE 1.0507009873554805f
#define SELU_ALPHA 1.6732632423543772f
#define GAUSSIAN 0.3989422804014327f /* 1 / sqrt(2 pi) */
#define CUBIC 0.044715f

/* exp(x) and exp(x) - 1 for x <= 0, both accurate to a few units in the last place. */
typedef struct {
    float exp, less_one;
} Exp;

static inline Exp exp_of_negative(float x) {
    const float clamped = x < -87.0f ? -87.0f : x;
    const float k = rintf(clamped * 1.44269504088896341f);
    const float r = (clamped - k * 0.693359375f) + k * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r;
    const int32_t bits = ((int32_t)k + 127) << 23;
    float scale;
    memcpy(&scale, &bits, 4);
    return (Exp){x < -87.0f ? 0.0f : p * scale + scale, p * scale + (scale - 1.0f)};
}

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

/* The standard normal distribution function, from exp(-h^2 / 2): Abramowitz and Stegun, 7.1.26. */
static inline float normal(float h, float bell) {
    const float t = 1.0f / (0.23164189f * fabsf(h) + 1.0f);
    float p = 1.061405429f;
    p = p * t - 1.453152027f;
    p = p * t + 1.421413741f;
    p = p * t - 0.284496736f;
    p = p * t + 0.254829592f;
    const float tail = 0.5f * p * t * bell;
    return h < 0 ? tail : 1.0f - tail;
}

/* The following take e = exp(-|h|) or m = exp(-|h|) - 1, which cannot overflow. */
static inline float sigmoid(float h, float e) { return (h < 0 ? e : 1.0f) / (1.0f + e); }

static inline float tanh_of(float h, float m) {
    const float both = m * (m + 2.0f); /* exp(-2 |h|) - 1 */
    return copysignf(both / (both + 2.0f), h);
}

static inline float tanh_of_softplus(float h, float e) {
    const float n = h < 0 ? e * (e + 2.0f) : 2.0f * e + 1.0f;
    return n / (n + (h < 0 ? 2.0f : 2.0f * e * e));
}

/* The sine and the cosine of h, whose multiple of pi / 2 is removed in double precision. */
static inline void sine_of(float h, float *sine, float *cosine) {
    const double k = rint(h * 0.63661977236758134);
    const float r = (float)(h - k * 1.5707963267948966), q = r * r;
    const float quadrant = (float)(k - 4.0 * floor(0.25 * k));
    const float s = ((-1.9515295891e-4f * q + 8.3321608736e-3f) * q - 1.6666654611e-1f) * q * r + r;
    const float c = ((2.4433157118e-5f * q - 1.3887316255e-3f) * q + 4.1666645683e-2f) * q * q + (1.0f - 0.5f * q);
    const int swapped = quadrant == 1.0f || quadrant == 3.0f;
    const float a = swapped ? c : s, b = swapped ? s : c;
    *sine = quadrant >= 2.0f ? -a : a;
    *cosine = quadrant == 1.0f || quadrant == 2.0f ? -b : b;
}

/* tanh(u) of GELU's approximation and the derivatives of u. Beyond 100 the derivatives of the candidate are constant,
   and a power of h could overflow. */
typedef struct {
    float h, t, u1, u2, u3;
} Approximation;

static inline Approximation approximation(float h) {
    const float near = h < -100.0f ? -100.0f : h > 100.0f ? 100.0f : h, c = 0.7978845608028654f;
    const float u = c * (CUBIC * near * near * near + near);
    const float t = tanh_of(u, exp_of_negative(-fabsf(u)).less_one);
    return (Approximation){near, t, c * (3 * CUBIC * near * near + 1.0f), 6 * c * CUBIC * near, 6 * c * CUBIC};
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
    case RELU: EACH(first = h < 0 ? 0 : h; second = h > 0 ? 1 : 0);
    case LEAKY_RELU: EACH(second = h > 0 ? 1 : LEAK; first = h * second);
    case SIGMOID: EACH(first = sigmoid(h, e); second = first * (1 - first));
    case TANH: EACH(first = tanh_of(h, m); second = 1 - first * first);
    case IDENTITY: EACH(first = h; second = 1);
    case GELU: EACH(const float c = normal(h, bell); first = h * c;
                    second = GAUSSIAN * h * bell + c);
    case SILU: EACH(const float s = sigmoid(h, e); first = h * s; second = first * (1 - s) + s);
    case MISH: EACH(const float t = tanh_of_softplus(h, e); first = h * t;
                    second = h * sigmoid(h, e) * (1 - t * t) + t);
    case ELU: EACH(first = h > 0 ? h : m; second = h > 0 ? 1 : e);
    case SELU: EACH(first = SELU_SCALE * (h > 0 ? h : SELU_ALPHA * m);
                    second = SELU_SCALE * (h > 0 ? 1 : SELU_ALPHA * e));
    case SOFTPLUS: EACH(first = (h < 0 ? 0 : h) + log_of_one_plus(e); second = sigmoid(h, e));
    case HARDSWISH: EACH(const float r = h + 3; first = h * (r < 0 ? 0 : r > 6 ? 6 : r) / 6;
                         second = h < -3 ? 0 : h > 3 ? 1 : h / 3 + 0.5f);
    case RELU6: EACH(first = h < 0 ? 0 : h > 6 ? 6 : h; second = h > 0 && h < 6 ? 1 : 0);
    case SOFTSIGN: EACH(const float r = 1 / (1 + fabsf(h)); first = h * r; second = r * r);
    case RELU_SQUARED: EACH(const float r = h < 0 ? 0 : h; first = r * r; second = 2 * r);
    case SINE: EACH(sine_of(h, &first, &second));
    case GELU_TANH: EACH(const Approximation a = approximation(h); first = 0.5f * h * (1 + a.t);
                         second = 0.5f * (a.h * (1 - a.t * a.t) * a.u1 + 1 + a.t));
    }
}

/* The formulas of derivatives.py. */
static void second_and_third(int function, int size, const Tile *restrict tile, float *restrict firsts,
                             float *restrict seconds) {
    switch (function) {
    case SIGMOID: EACH(const float s = sigmoid(h, e), d = s * (1 - s); first = d * (1 - 2 * s); second = d * (1 - 6 * d));
    case TANH: EACH(const float t = tanh_of(h, m), d = 1 - t * t; first = -2 * t * d; second = d * (4 - 6 * d));
    case GELU: EACH(const float q = bell == 0 ? 0 : h * h, b = GAUSSIAN * bell; first = b * (2 - q);
                    second = b * h * (q - 4));
    case SILU: EACH(const float s = sigmoid(h, e), d = s * (1 - s), p = h * (1 - 2 * s); first = d * (p + 2);
                    second = d * ((1 - 2 * s) * (p + 3) - 2 * h * d));
    case MISH: EACH(const float s = sigmoid(h, e), s1 = s * (1 - s), s2 = s1 * (1 - 2 * s);
                    const float g = tanh_of_softplus(h, e), q = 1 - g * g, g1 = q * s, q1 = -2 * g * g1;
                    const float g2 = q1 * s + q * s1, q2 = -2 * (g1 * g1 + g * g2);
                    first = h * g2 + 2 * g1; second = h * (q2 * s + 2 * q1 * s1 + q * s2) + 3 * g2);
    case ELU: EACH(first = h < 0 ? e : 0; second = first);
    case SELU: EACH(first = h < 0 ? SELU_SCALE * SELU_ALPHA * e : 0; second = first);
    case SOFTPLUS: EACH(const float s = sigmoid(h, e); first = s * (1 - s); second = first * (1 - 2 * s));
    case HARDSWISH: EACH(first = h > -3 && h < 3 ? 1.0f / 3 : 0; second = 0);
    case SOFTSIGN: EACH(const float r = 1 / (1 + fabsf(h)), c = r * r * r; first = h == 0 ? 0 : copysignf(2 * c, -h);
                        second = 6 * c * r);
    case RELU_SQUARED: EACH(first = h > 0 ? 2 : 0; second = 0);
    case SINE: EACH(sine_of(h, &first, &second); first = -first; second = -second);
    case GELU_TANH: EACH(const Approximation a = approximation(h); const float d = 1 - a.t * a.t;
                         const float t2 = -2 * a.t * d, t3 = d * (4 - 6 * d), i1 = d * a.u1;
                         const float i2 = t2 * a.u1 * a.u1 + d * a.u2;
                         const float i3 = t3 * a.u1 * a.u1 * a.u1 + 3 * t2 * a.u1 * a.u2 + d * a.u3;
                         first = 0.5f * a.h * i2 + i1; second = 0.5f * a.h * i3 + 1.5f * i2);
    default: EACH(first = 0; second = 0); /* piecewise linear */
    }
}

/* The candidates of a sweep that are not dropped, and which one of each pair is blended and which one is summed. */
typedef struct {
    int32_t count;
    int32_t functions[MOST];
    int32_t columns[MOST]; /* the columns of the candidates in the tables of weights and sums */
    int32_t higher;        /* whether the pairs are the second and the third derivative */
    int32_t blended;       /* 0 or 1 */
    int32_t summed;        /* 0 or 1; -1 for no sums */
    int32_t shares_e, shares_bell; /* whether a candidate needs these parts of a tile */
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
