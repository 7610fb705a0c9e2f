/* All layers of a step in one parallel region.

   Every thread walks the ops and computes its share of each. Threads meet after an op whose result the others read. A single row is
   normalized and quantized by every thread for itself: that takes less time than a meeting.

   Nothing here adds numbers in another order than the functions that Python calls: only what is in rows.c, in the products and in
   attention computes. What is added here are single numbers: a residual, a factor, a bias.

   No memory is allocated here, or a step could fail after other ranks have begun theirs. */

#include <omp.h>
#include <string.h>

#include "panels.h"
#include "step.h"
#include "team.h"

enum { LINE = 64 };

/* What a thread needs to know of the step. */
typedef struct {
    const Program *program;
    const Step *step;
    i64 T;                      /* rows that ops compute */
    const i64 *rows_T;          /* which rows of the input these are; NULL: all */
    float *row_I;               /* of this thread */
    char *own_levels, *levels;  /* a quantized row of this thread, and those of all */
    float *rows_TI;             /* normalized rows of all */
    char *work;                 /* of attention */
    float *low_NR;              /* of adapters */
    Call *const *calls;         /* of each group */
} Place;

static i64 lines(i64 bytes) { return (bytes + LINE - 1) / LINE * LINE; }
INLINE float *at(const Place *on, i64 buffer) { return on->program->arena + buffer; }

/* Normalizes and quantizes row t, as far as the op does: what is multiplied is then in `p`. */
static void prepare_row(const Place *on, const Op *op, const Product *p, i64 t, float *row_I) {
    const float *x_I = at(on, op->in) + (on->rows_T == NULL ? t : on->rows_T[t]) * op->I;
    if (op->norm != NULL) rms_norm_row(x_I, op->norm, row_I, op->I, op->eps, op->offset);
    else if (op->kind != IN_BLOCKS) memcpy(row_I, x_I, (size_t)op->I * sizeof(float));
    if (op->kind == IN_BYTES) int8_quantize(p, t, row_I);
    if (op->kind == IN_BLOCKS) block_quantize(p, t, op->norm != NULL ? row_I : x_I);
}

static void prepare_rows(const Place *on, const Op *op, Product *p) {
    const int quantizes = op->kind == IN_BYTES || op->kind == IN_BLOCKS;
    p->x_TI = at(on, op->in);
    if (!quantizes && op->norm == NULL && on->rows_T == NULL) return;
    if (on->T == 1) {
        p->levels = on->own_levels;
        prepare_row(on, op, p, 0, on->row_I);
        if (!quantizes) p->x_TI = on->row_I;
        return;
    }
    p->levels = on->levels;
    if (!quantizes) p->x_TI = on->rows_TI;
#pragma omp for schedule(static)
    for (i64 t = 0; t < on->T; t++) prepare_row(on, op, p, t, quantizes ? on->row_I : on->rows_TI + t * op->I);
}

static void multiply(const Product *p, i64 panel, i64 last) {
    switch (p->kind) {
    case IN_BYTES: int8_panels(p, panel, last); break;
    case IN_BLOCKS: block_panels(p, panel, last); break;
    default: float_panels(p, panel, last);
    }
}

/* Finishes columns `begin` to `end` - 1 of a product, which this thread has computed. */
static void finish(const Place *on, const Op *op, i64 begin, i64 end) {
    float *out = at(on, op->out);
    for (i64 t = 0; t < on->T; t++) {
        float *out_O = out + t * op->stride;
        if (op->activation >= 0 && !op->gated) activate_columns(out_O + begin, NULL, out_O + begin, end - begin, op->activation);
        if (op->factor != 1.0f)
            for (i64 o = begin; o < end; o++) out_O[o] *= op->factor;
        if (op->residual < 0) continue;
        const float *residual_O = at(on, op->residual) + t * op->stride;
        for (i64 o = begin; o < end; o++) out_O[o] += residual_O[o];
    }
}

/* A product whose outputs are gates and then ups: a thread computes the same columns of both. The result is in `residual`, rows of
   half the width. */
static void multiply_gated(const Place *on, const Op *op, const Product *p) {
    const i64 half = op->O / 2, panels = half / LANES;
    i64 last, panel = first_panel(panels, &last);
    multiply(p, panel, last);
    multiply(p, panels + panel, panels + last);
    for (i64 t = 0; t < on->T; t++) {
        const float *gate = at(on, op->out) + t * op->stride + panel * LANES;
        activate_columns(gate, gate + half, at(on, op->residual) + t * half + panel * LANES, (last - panel) * LANES, op->activation);
    }
}

static void run_product(const Place *on, const Op *op) {
    Product p = {.weight = op->weight, .scale_O = op->scale, .bias_O = op->bias, .out_TO = at(on, op->out), .T = on->T, .I = op->I,
                 .O = op->O, .stride = op->stride, .block = op->block, .kind = op->kind, .type = op->type, .smallest = on->program->smallest};
    prepare_rows(on, op, &p);
    if (op->gated) multiply_gated(on, op, &p);
    else {
        i64 last, panel = first_panel(whole(op->O, LANES) / LANES, &last);
        multiply(&p, panel, last);
        finish(on, op, panel * LANES, last * LANES < op->O ? last * LANES : op->O);
    }
#pragma omp barrier
}

static void clip(float *x, i64 count, float most) {
    for (i64 i = 0; i < count; i++) x[i] = x[i] < -most ? -most : x[i] > most ? most : x[i];
}

/* Clips, normalizes and rotates queries and keys of row t, and stores keys and values. */
static void store_token(const Place *on, const Op *op, i64 t) {
    float *row = at(on, op->in) + t * op->O;
    if (op->clip > 0 && !op->clips_last) clip(row, op->O, op->clip);
    for (i64 h = 0; op->query_norm != NULL && h < op->H + op->K; h++)
        rms_norm_row(row + h * op->D, h < op->H ? op->query_norm : op->key_norm, row + h * op->D, op->D, op->eps, op->offset);
    if (op->clip > 0 && op->clips_last) clip(row, op->O, op->clip);
    if (op->rotary >= 0) {
        const StepAngles *angles = on->step->rotaries + op->rotary;
        rotate_row(row, op->H + op->K, op->D, angles->cos_TR + t * angles->R, angles->sin_TR + t * angles->R, angles->R,
                   angles->interleaved);
    }
    store_row(row + op->H * op->D, op->pages, on->step->groups[op->group].slots_T[t], op->C, op->half);
}

static void run_store(const Place *on, const Op *op) {
#pragma omp for schedule(static)
    for (i64 t = 0; t < on->T; t++) store_token(on, op, t);
}

static void run_attend(const Place *on, const Op *op) {
    Attention asked = on->step->groups[op->group].asked;
    asked.q_T = at(on, op->in), asked.out_T = at(on, op->out);
    asked.pages_NC = op->pages, asked.cold = op->cold, asked.sink_H = op->sinks;
    asked.scale = op->factor, asked.cap = op->cap;
    attend_team(&asked, on->calls[op->group]);
#pragma omp barrier
}

/* Norm, factor and residual by rows. */
static void run_add(const Place *on, const Op *op) {
#pragma omp for schedule(static)
    for (i64 t = 0; t < on->T; t++) {
        const float *x = at(on, op->in) + t * op->I, *residual = op->residual < 0 ? NULL : at(on, op->residual) + t * op->I;
        float *out = at(on, op->out) + t * op->I;
        if (op->norm != NULL) rms_norm_row(x, op->norm, out, op->I, op->eps, op->offset), x = out;
        for (i64 e = 0; e < op->I; e++) {
            const float scaled = op->factor == 1.0f ? x[e] : x[e] * op->factor;
            out[e] = residual == NULL ? scaled : scaled + residual[e];
        }
    }
}

/* activation(x), or activation(gate) * up of rows of both. */
static void run_activate(const Place *on, const Op *op) {
#pragma omp for schedule(static)
    for (i64 t = 0; t < on->T; t++) {
        const float *x = at(on, op->in) + t * (op->gated ? 2 : 1) * op->I;
        activate_columns(x, op->gated ? x + op->I : NULL, at(on, op->out) + t * op->I, op->I, op->activation);
    }
}

static void run_adapt(const Place *on, const Op *op) {
    const Step *step = on->step;
    const Adapted p = {.x_TI = at(on, op->in), .out_TO = at(on, op->out), .site = (const Site *)op->weight, .segments = step->segments,
                       .index_N = step->index_N, .low_NR = on->low_NR, .x_stride = op->I, .out_stride = op->stride, .I = op->I,
                       .N = step->N, .num_segments = step->num_segments, .ids_T = op->op == ADAPT_EMBED ? step->ids_T : NULL,
                       .first_id = op->first, .num_ids = op->O};
    adapters_team(&p);
}

static void run_adapt_head(const Place *on, const Op *op) {
    const Step *step = on->step;
    const Adapted p = {.x_TI = at(on, op->in), .out_TO = at(on, op->out), .site = (const Site *)op->weight, .segments = step->last_segments,
                       .index_N = step->last_index_N, .low_NR = on->low_NR, .x_stride = op->I, .out_stride = op->stride, .I = op->I,
                       .N = step->last_N, .num_segments = step->last_num_segments, .rows_T = step->last_R};
    adapters_team(&p);
}

/* The embedding's row of each token. It is zeros where another rank has it. */
static void run_embed(const Place *on, const Op *op) {
#pragma omp for schedule(static)
    for (i64 t = 0; t < on->T; t++) {
        const i64 o = on->step->ids_T[t] - op->first;
        const uint8_t *weight = (const uint8_t *)op->weight;
        float *x_I = at(on, op->out) + t * op->I;
        if (o < 0 || o >= op->O) memset(x_I, 0, (size_t)op->I * sizeof(float));
        else if (op->kind == IN_BYTES) int8_row(weight, op->scale, o, x_I, op->I, op->block);
        else if (op->kind == IN_BLOCKS) blocks_row(weight, o, x_I, op->I, op->type);
        else memcpy(x_I, (const float *)op->weight + o * op->I, (size_t)op->I * sizeof(float));
    }
}

/* Cosines and sines of each token's position. Nobody reads them before the threads have met after a product. */
static void run_angles(const Place *on, const Op *op) {
    const StepAngles *to = on->step->rotaries + op->rotary;
#pragma omp for schedule(static) nowait
    for (i64 t = 0; t < on->T; t++)
        angles_row(on->step->positions_T[t], op->norm, to->cos_TR + t * to->R, to->sin_TR + t * to->R, to->R, to->interleaved,
                   op->factor);
}

/* A product of the rows that are wanted: the last of each sequence that gets a token. */
static void run_head(const Place *on, const Op *op) {
    Place wanted = *on;
    wanted.T = on->step->R, wanted.rows_T = on->step->last_R;
    run_product(&wanted, op);
}

/* The greatest logit of each row that is wanted. */
static void run_greatest(const Place *on, const Op *op) {
    const Step *step = on->step;
#pragma omp for schedule(static)
    for (i64 r = 0; r < step->R; r++) greatest_row(at(on, op->in) + r * op->stride, op->O, step->best_R + r, step->token_R + r);
}

/* Sums over all ranks. Returns the status of the meeting, the same in every thread. */
static int run_reduce(const Place *on, const Op *op, int again) {
    const int status = meeting_reduce_together(on->program->meeting, at(on, op->in), on->T * op->I, again);
#pragma omp barrier
    return status;
}

static int run_op(const Place *on, const Op *op, int again) {
    const Meeting *meeting = on->program->meeting;
    if (meeting != NULL && omp_get_thread_num() == 0) meeting_at(meeting, op->layer, op->place);
    switch (op->op) {
    case REDUCE: return run_reduce(on, op, again);
    case PRODUCT: run_product(on, op); break;
    case STORE: run_store(on, op); break;
    case ATTEND: run_attend(on, op); break;
    case ADD: run_add(on, op); break;
    case EMBED: run_embed(on, op); break;
    case ANGLES: run_angles(on, op); break;
    case HEAD: run_head(on, op); break;
    case GREATEST: run_greatest(on, op); break;
    case ADAPT: case ADAPT_EMBED: run_adapt(on, op); break;
    case ADAPT_HEAD: run_adapt_head(on, op); break;
    default: run_activate(on, op);
    }
    return MEETING_OK;
}

/* Divides the program's memory. Returns the bytes that the step needs; nothing is beyond what there is. */
static i64 divide(const Program *program, const Step *step, Call **calls, Place *on) {
    const i64 T = step->T, own = program->threads * lines(program->most_inputs * 4 + program->most_row_bytes);
    i64 used = own, work = 0;
    char *memory = program->memory;
    on->levels = memory + used, used += lines(T * program->most_row_bytes);
    on->rows_TI = (float *)(memory + used), used += lines(T * program->most_inputs * 4);
    on->low_NR = (float *)(memory + used), used += lines((step->N > step->last_N ? step->N : step->last_N) * step->low_floats * 4);
    for (i64 g = 0; g < program->num_groups; g++) {
        const Attention *asked = &step->groups[g].asked;
        const i64 bytes = asked->K > 0 ? lines(attend_tasks_bytes(asked)) : 0;
        if (bytes > 0 && used + bytes <= program->memory_bytes) {
            calls[g] = attend_divide(asked, memory + used, program->threads);
            const i64 more = attend_work_bytes(calls[g], program->threads);
            work = more > work ? more : work;
        }
        used += bytes;
    }
    on->work = memory + used;
    return used + lines(work);
}

enum { MOST_GROUPS = 64 };

int run_step(Program *program, const Step *step, i64 first, i64 last, int again) {
    Call *calls[MOST_GROUPS] = {NULL};
    Place shared = {.program = program, .step = step, .T = step->T, .calls = calls};
    program->needed_bytes = divide(program, step, calls, &shared);
    int failed = MEETING_OK;
    if (program->needed_bytes > program->memory_bytes) return STEP_SHORT;
    for (i64 g = 0; g < program->num_groups; g++)
        if (calls[g] != NULL) attend_open(&step->groups[g].asked, calls[g], shared.work);
#pragma omp parallel num_threads((int)program->threads)
    {
        Place own = shared;
        char *memory = program->memory + omp_get_thread_num() * lines(program->most_inputs * 4 + program->most_row_bytes);
        own.row_I = (float *)memory, own.own_levels = memory + program->most_inputs * 4;
        int status = MEETING_OK;
        for (i64 n = first; n < last && status == MEETING_OK; n++) {
            status = run_op(&own, program->ops + n, again && n == first);
            if (status != MEETING_OK && omp_get_thread_num() == 0) failed = status, program->reached = n;
        }
    }
    /* A rank that waits in vain shows where. One that leaves the step does something else next. */
    if (program->meeting != NULL && (failed == MEETING_OK || failed == MEETING_GAVE_UP))
        meeting_at(program->meeting, BOARD_NO_LAYER, PLACE_NONE);
    return failed;
}

/* The bytes of a struct, which Python compares with its own. */
i64 step_struct_bytes(int which) {
    const size_t bytes[] = {sizeof(Op), sizeof(StepAngles), sizeof(StepGroup), sizeof(Program), sizeof(Step)};
    return (i64)bytes[which];
}
