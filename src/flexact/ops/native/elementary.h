/* The exponential function and the sine in operations that a compiler can vectorize. */

#include <math.h>
#include <stdint.h>
#include <string.h>

/* exp(x) = (1 + p) 2^k. */
typedef struct {
    float p;
    int32_t k;
} Reduced;

/* Reduce an x in [-104, 89]. */
static inline Reduced reduced(float x) {
    const float to_integer = 12582912.0f; /* 1.5 * 2^23: in a sum with it, the lowest bits are the rounded summand */
    const float shifted = x * 1.44269504088896341f + to_integer, k = shifted - to_integer;
    const float r = (x - k * 0.693359375f) + k * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    int32_t bits;
    memcpy(&bits, &shifted, 4);
    return (Reduced){p * (r * r) + r, bits - 0x4b400000};
}

/* 2^k for k in [-126, 127]. */
static inline float power_of_two(int32_t k) {
    const uint32_t bits = (uint32_t)(k + 127) << 23;
    float power;
    memcpy(&power, &bits, 4);
    return power;
}

/* exp(x) and exp(x) - 1 for x <= 0, both accurate to a few units in the last place. Below -87, where it approaches the
   subnormal numbers, exp(x) is 0. */
typedef struct {
    float exp, less_one;
} Exp;

static inline Exp exp_of_negative(float x) {
    const Reduced e = reduced(x < -87.0f ? -87.0f : x);
    const float scale = power_of_two(e.k);
    return (Exp){x < -87.0f ? 0.0f : e.p * scale + scale, e.p * scale + (scale - 1.0f)};
}

/* The sine and the cosine of h, up to |h| = 1e9. A multiple of pi / 2 is removed in double precision. */
static inline void sine_of(float h, float *sine, float *cosine) {
    const double to_integer = 6755399441055744.0; /* 1.5 * 2^52 */
    const double shifted = h * 0.63661977236758134 + to_integer, k = shifted - to_integer;
    const float r = (float)(h - k * 1.5707963267948966), q = r * r;
    uint64_t bits;
    memcpy(&bits, &shifted, 8);
    const uint32_t quadrant = (uint32_t)bits;
    const float s = ((-1.9515295891e-4f * q + 8.3321608736e-3f) * q - 1.6666654611e-1f) * q * r + r;
    const float c = ((2.4433157118e-5f * q - 1.3887316255e-3f) * q + 4.1666645683e-2f) * q * q + (1.0f - 0.5f * q);
    const float a = quadrant & 1 ? c : s, b = quadrant & 1 ? s : c;
    *sine = quadrant & 2 ? -a : a;
    *cosine = (quadrant + 1) & 2 ? -b : b;
}
