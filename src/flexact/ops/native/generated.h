/* The functions of generated code; see `operations.py`. NaN propagates, and results overflow as torch's do. */

#include "elementary.h"

#define where(mask, a, b) ((mask) ? (a) : (b))
#define abs_of fabsf
#define floor_of floorf
#define sqrt_of sqrtf

static inline float exp_of(float x) {
    const Reduced e = reduced(x < -104.0f ? -104.0f : x > 89.0f ? 89.0f : x);
    const int32_t half = e.k / 2;
    const float scale = power_of_two(half);
    return (e.p * scale + scale) * power_of_two(e.k - half);
}

static inline float expm1_of(float x) {
    const Reduced e = reduced(x < -87.0f ? -87.0f : x > 80.0f ? 80.0f : x);
    const float scale = power_of_two(e.k);
    return x > 80.0f ? exp_of(x) : e.p * scale + (scale - 1.0f);
}

/* The logarithm of m 2^k for m between sqrt(1/2) and sqrt(2), by a polynomial in m - 1. */
static inline float log_of(float x) {
    const int is_tiny = x < 1.17549435e-38f;
    const float scaled = is_tiny ? x * 8388608.0f : x;
    int32_t bits;
    memcpy(&bits, &scaled, 4);
    const int32_t k = (bits - 0x3f3504f3) >> 23;
    bits -= k << 23;
    float m;
    memcpy(&m, &bits, 4);
    const float f = m - 1.0f, exponent = (float)(is_tiny ? k - 23 : k);
    float p = 7.0376836292e-2f;
    p = p * f - 1.1514610310e-1f;
    p = p * f + 1.1676998740e-1f;
    p = p * f - 1.2420140846e-1f;
    p = p * f + 1.4249322787e-1f;
    p = p * f - 1.6668057665e-1f;
    p = p * f + 2.0000714765e-1f;
    p = p * f - 2.4999993993e-1f;
    p = p * f + 3.3333331174e-1f;
    const float rest = p * f * f * f - 2.12194440e-4f * exponent - 0.5f * f * f;
    const float log = f + rest + 0.693359375f * exponent;
    return x > 0 ? (x < INFINITY ? log : x) : x == 0 ? -INFINITY : NAN;
}

/* log(u) x / (u - 1) for u = 1 + x, in which the rounding errors of u cancel. */
static inline float log1p_of(float x) {
    const float u = 1.0f + x, d = u - 1.0f;
    return d == 0 ? x : x > 1e9f ? log_of(x) : log_of(u) * (x / d);
}

static inline float sigmoid_of(float x) {
    const float e = exp_of_negative(-fabsf(x)).exp;
    return (x < 0 ? e : 1.0f) / (1.0f + e);
}

static inline float tanh_of(float x) {
    const float m = exp_of_negative(-2.0f * fabsf(x)).less_one;
    return copysignf(m / (m + 2.0f), x);
}

/* The Taylor series near 0; beyond, Abramowitz and Stegun, 7.1.26. */
static inline float erf_of(float x) {
    const float size = fabsf(x), q = x * x;
    float series = 1.0f / 9360;
    series = series * q - 1.0f / 1320;
    series = series * q + 1.0f / 216;
    series = series * q - 1.0f / 42;
    series = series * q + 1.0f / 10;
    series = series * q - 1.0f / 3;
    const float near = 1.1283791670955126f * (series * q * x + x);
    const float t = 1.0f / (0.3275911f * size + 1.0f);
    float p = 1.061405429f;
    p = p * t - 1.453152027f;
    p = p * t + 1.421413741f;
    p = p * t - 0.284496736f;
    p = p * t + 0.254829592f;
    const float far = copysignf(1.0f - p * t * exp_of_negative(-q).exp, x);
    return size < 0.6f ? near : far;
}

/* The sine of larger numbers is arbitrary: they are hundreds of periods apart. */
static inline float sin_of(float x) {
    float sine, cosine;
    sine_of(fabsf(x) < 1e9f ? x : x - x, &sine, &cosine);
    return sine;
}

static inline float cos_of(float x) {
    float sine, cosine;
    sine_of(fabsf(x) < 1e9f ? x : x - x, &sine, &cosine);
    return cosine;
}

static inline float pow_of(float x, float y) { return exp_of(y * log_of(x)); }
