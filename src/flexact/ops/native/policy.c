/* The probabilities of all sites of a model, and the policy's step of their logits, in one call each. The tables are
   described in `policy_tables.py`; `routing.router` and `policy.logit_updates` are the reference in torch.

   Comparisons are written so that NaN propagates. */

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define MOST 16 /* candidates of a site */

/* The same constants as in `policy.evidence` and `policy.logit_updates`. */
#define SMALLEST_P 1e-30f
#define SMALLEST_NORM 1e-100

/* Write the softmax of x, in place; if `shifted` is given, write the logarithms of the softmax to it. */
static void softmax(float *x, float *shifted, int count) {
    float most = -INFINITY, sum = 0;
    for (int k = 0; k < count; k++)
        if (x[k] > most) most = x[k];
    for (int k = 0; k < count; k++) sum += expf(x[k] - most);
    for (int k = 0; k < count; k++) {
        const float difference = x[k] - most;
        if (shifted) shifted[k] = difference - logf(sum);
        x[k] = shifted ? expf(shifted[k]) : expf(difference) / sum;
    }
}

/* Write pi and p = softmax((log pi + noise) / temperature), (rows, count) each. */
void draw(const float *values, const int64_t *layout, const uint8_t *alive, const float *noise, float *pi, float *p,
          int64_t rows, int count) {
    for (int64_t row = 0; row < rows; row++, layout += 3, alive += count, noise += count, pi += count, p += count) {
        float log_pi[MOST];
        for (int k = 0; k < count; k++) pi[k] = alive[k] ? values[layout[0] + k] : -INFINITY;
        softmax(pi, log_pi, count);
        for (int k = 0; k < count; k++) p[k] = (log_pi[k] + noise[k]) / values[layout[2]];
        softmax(p, NULL, count);
    }
}

/* The tensors of a step, in the order of `Tables` and of `RoundStatistics.tensors`. */
typedef struct {
    const float *values;
    const int64_t *layout, *calls, *grouped_rows, *group_starts;
    const uint8_t *alive;
    const float *p, *q, *width, *alpha, *step_size, *factors; /* factors may be NULL */
    float *mean;
    double *square;
    float *weights, *count, *total, *products, *found;
} Step;

typedef struct {
    int64_t groups;
    int32_t count;    /* columns of the tables */
    int32_t most;     /* the maximum number of calls of a row */
    int32_t pulls;    /* whether the KL pulls the logits */
    float lam;
    double mean_rate, square_rate;
} Settings;

static void add_advantages(const Step *step, int64_t row, const float *gradient, int count, float *sum) {
    double advantage[MOST], square = 0;
    for (int k = 0; k < count; k++) {
        const float p = step->p[row * count + k];
        advantage[k] = (double)gradient[k] / (p < SMALLEST_P ? SMALLEST_P : p);
        square += advantage[k] * advantage[k];
    }
    const double norm = sqrt(square);
    for (int k = 0; k < count; k++) sum[k] += (float)(advantage[k] / (norm < SMALLEST_NORM ? SMALLEST_NORM : norm));
}

/* Update the running averages of a row if it moves. Write the mean, and return the root mean square, bias-corrected. */
static float average(const Step *step, const Settings *settings, int64_t row, const float *gradient, int moves,
                     float *change) {
    const int count = settings->count;
    const float mean_rate = (float)settings->mean_rate;
    float *mean = step->mean + row * count, *weights = step->weights + 2 * row;
    if (moves) {
        double square = 0, alive = 0;
        for (int k = 0; k < count; k++) {
            square += (double)gradient[k] * gradient[k], alive += step->alive[row * count + k];
            mean[k] += mean_rate * (gradient[k] - mean[k]);
        }
        step->square[row] += settings->square_rate * (square / alive - step->square[row]);
        weights[0] += mean_rate * (1 - weights[0]);
        weights[1] += (float)settings->square_rate * (1 - weights[1]);
    }
    for (int k = 0; k < count; k++) change[k] = mean[k] / weights[0];
    const float size = (float)sqrt(step->square[row] / weights[1]);
    return size < FLT_MIN ? FLT_MIN : size;
}

/* Add the gradient of the KL to the change of a row that was called. */
static void pull(const Step *step, const Settings *settings, int64_t row, float size, float *change) {
    const int64_t *calls = step->calls + row * (2 + settings->most);
    const int count = settings->count, own = (int)step->layout[3 * row + 1];
    if (!calls[0]) return; /* without a call there is no target */
    float target[MOST];
    for (int k = 0; k < count; k++) {
        float sensitivity = 0;
        for (int64_t call = 0; call < calls[1]; call++)
            if (k < own) sensitivity += step->values[calls[2 + call] + k];
        target[k] = step->alive[row * count + k] ? -(sensitivity / calls[1]) / settings->lam : -INFINITY;
    }
    softmax(target, NULL, count);
    const float weight = *step->alpha * size / step->width[row];
    for (int k = 0; k < count; k++) change[k] += weight * (step->q[row * count + k] - target[k]);
}

/* Update the averages and the evidence of one group of rows, and write the changes to subtract from their logits. */
static void update_group(const Step *step, const Settings *settings, const int64_t *rows, int64_t size) {
    const int count = settings->count;
    float changes[MOST] = {0}, advantages[MOST] = {0};
    int any_moves = 0;
    for (int64_t i = 0; i < size; i++) {
        const int64_t row = rows[i], *layout = step->layout + 3 * row;
        const int own = (int)layout[1];
        const float factor = step->factors ? step->factors[row] : 1;
        const int moves = factor != 0;
        float gradient[MOST], change[MOST];
        for (int k = 0; k < count; k++)
            gradient[k] = k < own && moves ? step->values[layout[0] + k] * factor : 0;
        add_advantages(step, row, gradient, count, advantages);
        const float root = average(step, settings, row, gradient, moves, change);
        if (settings->pulls) pull(step, settings, row, root, change);
        for (int k = 0; k < own && moves; k++) changes[k] += *step->step_size * (change[k] / root);
        any_moves |= moves;
    }
    for (int k = 0; k < count; k++) changes[k] /= (float)size, advantages[k] /= (float)size;
    for (int64_t i = 0; i < size; i++) {
        const int64_t row = rows[i], *layout = step->layout + 3 * row;
        memcpy(step->found + layout[0], changes, layout[1] * sizeof(float));
        step->count[row] += (float)any_moves;
        for (int k = 0; k < count; k++) {
            step->total[row * count + k] += advantages[k];
            for (int j = 0; j < count; j++)
                step->products[(row * count + k) * count + j] += advantages[k] * advantages[j];
        }
    }
}

void update(const Step *step, const Settings *settings) {
    const int64_t *starts = step->group_starts;
    for (int64_t group = 0; group < settings->groups; group++)
        update_group(step, settings, step->grouped_rows + starts[group], starts[group + 1] - starts[group]);
}
