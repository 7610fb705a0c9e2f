/* Programs against the functions that Python calls, bit for bit, without Python: `step_driver RANKS THREADS`.

   Each rank runs its programs in a team of THREADS threads. Ranks are threads of this process, and meet in its memory. In every step
   one of them stops for a while between two ops, so that the others' meetings end with MEETING_AGAIN and are resumed. Every buffer
   has as many bytes as the step may use, in memory of its own: a sanitizer sees what is beyond. Each layer has other kinds of
   weights, and other options of its ops.

   Prints how many meetings were resumed, and ends with 0; or with 1 at the first number that differs.

   Legend: T tokens, E hidden size, H query heads, K key-value heads, D head dimension, C columns of a slot, F width of a
   feed-forward part, R rotated numbers of a head, S sequences. */

#define _POSIX_C_SOURCE 200809L

#include "step.h"
#include "team.h"

#include <float.h>
#include <omp.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

i64 float_packed_bytes(i64, i64, int);
void float_pack(const float *, char *, i64, i64, int);
void float_product(const float *, const char *, const float *, float *, i64, i64, i64, int);
void float_product_unpacked(const float *, const float *, const float *, float *, i64, i64, i64);
i64 int8_packed_bytes(i64, i64);
void int8_pack(const int8_t *, uint8_t *, i64, i64);
int int8_product(const float *, const uint8_t *, const float *, float *, i64, i64, i64, i64, float);
i64 blocks_packed_bytes(i64, i64, int);
void blocks_pack(const uint8_t *, i64, i64, uint8_t *, i64, i64, int);
int blocks_product(const float *, const uint8_t *, const float *, float *, i64, i64, i64, int, float);
void rms_norm(const float *, const float *, float *, i64, i64, float, float);
void rotary_angles(const i64 *, const float *, float *, float *, i64, i64, int, float);
void rotate_and_store(float *, i64, i64, i64, i64, const float *, const float *, i64, int, i64, void *, const i64 *, i64, int);
void activate_gate(const float *, float *, i64, i64, int);
int attend(const Attention *);

enum { E = 288, H = 6, K = 2, D = 24, C = 2 * K * D, QKV = H * D + C, F = 160, R = 16, LAYERS = 4, MOST_OPS = 64 };
enum { BLOCK_SIZE = 4, PAGES = 16, SEQUENCES = 3, SLOTS_N = SEQUENCES * PAGES * BLOCK_SIZE, GROUPS = 2, WINDOW = 5 };
enum { MOST_RANKS = 3, PAGE = 4096, SLOTS = 2 << 20, BOARD_WORDS = 4096, LATE_MS = 120 };
enum { SILU = 0, GELU_TANH = 2, Q4_0 = 2, Q8_0 = 8 };
enum { QKV_W, O_W, UP_W, DOWN_W, WEIGHTS };
enum { IN_STEP, APART, WAYS }; /* who computes */

/* New tokens of each sequence: prompts, decoding, and both at once; one token, and as many as a program takes. */
static const i64 NEW[][SEQUENCES] = {{17, 0, 2}, {1, 3, 1}, {1, 1, 1}, {39, 5, 20}, {0, 1, 0}, {1, 1, 0}, {1, 0, 0}};
enum { STEPS = sizeof(NEW) / sizeof(NEW[0]) };

typedef struct {
    int kind, type;
    i64 I, O, block;
    char *packed;
    float *scale, *bias;
} Weight;

typedef struct {
    Weight weights[WEIGHTS];
    float *norms[2], *post, *query_norm, *key_norm, *sinks;
    float factor, cap;
    int group, half, gated, activation;
    char *pages[WAYS];
} Layer;

typedef struct {
    int number;
    Layer layers[LAYERS];
    float *x[WAYS]; /* of the step: in, and out */
    Program program;
    Op ops[MOST_OPS];
    float *buffers[MOST_OPS];
    int num_buffers;
    Meeting meeting;
    Word board[BOARD_WORDS];
    int late_at;    /* the op before which this rank stops in this step; -1: none */
    long resumed;
} Rank;

static int num_ranks, num_threads;
static Rank ranks[MOST_RANKS];
static Step step;
static StepGroup groups[GROUPS];
static StepAngles angles;

static void fail(const char *what, int rank, i64 at) {
    fprintf(stderr, "step_driver: %s, rank %d, %ld\n", what, rank, (long)at);
    exit(1);
}

static void *some(i64 bytes) {
    void *memory = aligned_alloc(64, (size_t)((bytes + 63) / 64 * 64));
    if (memory == NULL) fail("no memory", 0, bytes);
    return memory;
}

/* As many bytes as asked for, and not one more. */
static void *exactly(i64 bytes) {
    void *memory = malloc((size_t)bytes);
    if (memory == NULL) fail("no memory", 0, bytes);
    return memory;
}

static uint32_t drawn = 20011;
static uint32_t draw(void) { return (drawn = drawn * 1664525u + 1013904223u) >> 8; }

static float *numbers(i64 count, float middle, float most) {
    float *found = exactly(count * 4);
    for (i64 i = 0; i < count; i++) found[i] = middle + most * ((float)(draw() % 20001) / 10000.0f - 1.0f);
    return found;
}

static uint8_t *blocks_of(i64 O, i64 I, int type) {
    const i64 bytes = type == Q8_0 ? 34 : 18;
    uint8_t *found = exactly(O * I / 32 * bytes);
    for (i64 b = 0; b < O * I / 32 * bytes; b++) found[b] = (uint8_t)draw();
    for (i64 b = 0; b < O * I / 32; b++) found[b * bytes + 1] = 0x14; /* a scale of about 0.001 */
    return found;
}

static Weight weight_of(int kind, int type, i64 I, i64 O, i64 block) {
    Weight w = {.kind = kind, .type = type, .I = I, .O = O, .block = block, .bias = numbers(O, 0, 0.1f)};
    float *floats = numbers(O * I, 0, 0.05f);
    if (kind == IN_BYTES) {
        int8_t *levels = exactly(O * I);
        for (i64 n = 0; n < O * I; n++) levels[n] = (int8_t)((int)(draw() % 255) - 127);
        w.packed = some(int8_packed_bytes(O, I)), w.scale = numbers(O, 0.0005f, 0.0002f);
        int8_pack(levels, (uint8_t *)w.packed, O, I);
        free(levels);
    } else if (kind == IN_BLOCKS) {
        uint8_t *rows = blocks_of(O, I, type);
        const i64 bytes = blocks_packed_bytes(O, I, type);
        w.packed = memset(some(bytes), 0, (size_t)bytes);
        blocks_pack(rows, I / 32 * (type == Q8_0 ? 34 : 18), O, (uint8_t *)w.packed, 0, I, type);
        free(rows);
    } else if (kind == UNPACKED) {
        w.packed = (char *)floats;
        return w;
    } else {
        w.packed = some(float_packed_bytes(O, I, kind == IN_HALVES));
        float_pack(floats, w.packed, O, I, kind == IN_HALVES);
    }
    free(floats);
    return w;
}

static void make_layer(Layer *layer, int n) {
    static const int kinds[LAYERS][WEIGHTS] = {{IN_BYTES, IN_BYTES, IN_BYTES, IN_BYTES}, {IN_FLOATS, IN_HALVES, IN_BLOCKS, UNPACKED},
                                               {IN_BLOCKS, IN_BYTES, IN_FLOATS, IN_BLOCKS}, {UNPACKED, IN_FLOATS, IN_BYTES, IN_HALVES}};
    const int type = n % 2 ? Q4_0 : Q8_0;
    *layer = (Layer){.factor = n % 2 ? 0.7f : 1.0f, .cap = n == 2 ? 3.0f : 0.0f, .group = n % 2, .half = n % 2, .gated = n % 2 == 0,
                     .activation = n == 0 ? SILU : GELU_TANH};
    layer->weights[QKV_W] = weight_of(kinds[n][QKV_W], type, E, QKV, n == 0 ? 32 : 1);
    layer->weights[O_W] = weight_of(kinds[n][O_W], type, H * D, E, n == 0 ? 16 : 1);
    layer->weights[UP_W] = weight_of(kinds[n][UP_W], type, E, 2 * F, n == 0 ? 32 : 1);
    layer->weights[DOWN_W] = weight_of(kinds[n][DOWN_W], type, F, E, n == 0 ? 32 : 1);
    for (int half = 0; half < 2; half++) layer->norms[half] = numbers(E, 1, 0.2f);
    if (n == 1) layer->post = numbers(E, 1, 0.2f);
    if (n == 2) layer->query_norm = numbers(D, 1, 0.2f), layer->key_norm = numbers(D, 1, 0.2f);
    if (n == 3) layer->sinks = numbers(H, 0, 1);
    for (int way = 0; way < WAYS; way++) {
        const i64 bytes = SLOTS_N * C * (layer->half ? 2 : 4);
        layer->pages[way] = memset(exactly(bytes), 0, (size_t)bytes);
    }
}

/* The inputs of a step: which tokens, where they are stored, and what they see. */
static void begin_step(int number, i64 *length) {
    static i64 rows[SEQUENCES], count[SEQUENCES], lengths[SEQUENCES], tables[SEQUENCES * PAGES], slots[64], positions[64];
    static const float frequencies[R] = {1, 0.5f, 0.2f, 0.1f, 0.05f, 0.02f, 0.01f, 0.005f, 1, 0.5f, 0.2f, 0.1f, 0.05f, 0.02f, 0.01f, 0.005f};
    i64 S = 0, T = 0;
    for (i64 s = 0; s < SEQUENCES; s++) {
        if (NEW[number][s] == 0) continue;
        rows[S] = T, count[S] = NEW[number][s];
        for (i64 page = 0; page < PAGES; page++) tables[S * PAGES + page] = (page * SEQUENCES + s) % (PAGES * SEQUENCES);
        for (i64 n = 0; n < count[S]; n++, T++, length[s]++) {
            positions[T] = length[s];
            slots[T] = tables[S * PAGES + length[s] / BLOCK_SIZE] * BLOCK_SIZE + length[s] % BLOCK_SIZE;
        }
        lengths[S++] = length[s];
    }
    free((void *)angles.cos_TR), free((void *)angles.sin_TR);
    float *cosines = exactly(T * R * 4), *sines = exactly(T * R * 4);
    rotary_angles(positions, frequencies, cosines, sines, T, R, 0, 1.0f);
    angles = (StepAngles){.cos_TR = cosines, .sin_TR = sines, .R = R};
    for (int g = 0; g < GROUPS; g++)
        groups[g] = (StepGroup){.slots_T = slots, .asked = {.rows_S = rows, .num_new_S = count, .length_S = lengths, .tables_SB = tables,
                                                            .B = PAGES, .S = S, .C = C, .values = K * D, .K = K, .G = H / K, .D = D, .half = g,
                                                            .block_size = BLOCK_SIZE, .window = g ? WINDOW : 0, .q_stride = QKV,
                                                            .out_stride = H * D}};
    step = (Step){.T = T, .groups = groups, .rotaries = &angles};
}

/* With the functions that Python calls. */

static void product(const Weight *w, const float *x, float *out) {
    const i64 T = step.T;
    if (w->kind == UNPACKED) float_product_unpacked(x, (const float *)w->packed, w->bias, out, T, w->I, w->O);
    else if (w->kind == IN_BLOCKS) blocks_product(x, (const uint8_t *)w->packed, w->bias, out, T, w->I, w->O, w->type, FLT_MIN);
    else if (w->kind == IN_BYTES) {
        int8_product(x, (const uint8_t *)w->packed, w->scale, out, T, w->I, w->O, w->block, FLT_MIN);
        for (i64 n = 0; n < T * w->O; n++) out[n] += w->bias[n % w->O];
    } else float_product(x, w->packed, w->bias, out, T, w->I, w->O, w->kind == IN_HALVES);
}

static void attention_apart(const Layer *layer, const float *x, float *out) {
    const i64 T = step.T;
    float *normed = exactly(T * E * 4), *qkv = exactly(T * QKV * 4), *attended = exactly(T * H * D * 4);
    rms_norm(x, layer->norms[0], normed, T, E, 1e-6f, 0.5f);
    product(&layer->weights[QKV_W], normed, qkv);
    for (i64 n = 0; layer->query_norm != NULL && n < T * (H + K); n++) {
        float *head = qkv + n / (H + K) * QKV + n % (H + K) * D;
        rms_norm(head, n % (H + K) < H ? layer->query_norm : layer->key_norm, head, 1, D, 1e-5f, 0.0f);
    }
    rotate_and_store(qkv, QKV, T, H + K, D, angles.cos_TR, angles.sin_TR, R, 0, H * D, layer->pages[APART], groups[layer->group].slots_T,
                     C, layer->half);
    Attention asked = groups[layer->group].asked;
    asked.q_T = qkv, asked.out_T = attended, asked.pages_NC = layer->pages[APART], asked.sink_H = layer->sinks;
    asked.scale = 0.2f, asked.cap = layer->cap;
    if (attend(&asked)) fail("no memory for attention", 0, T);
    product(&layer->weights[O_W], attended, out);
    free(normed), free(qkv), free(attended);
}

static void feed_forward_apart(const Layer *layer, const float *x, float *out) {
    const i64 T = step.T;
    float *normed = exactly(T * E * 4), *gates = exactly(T * 2 * F * 4), *activated = exactly(T * F * 4);
    rms_norm(x, layer->norms[1], normed, T, E, 1e-6f, 0.5f);
    product(&layer->weights[UP_W], normed, gates);
    activate_gate(gates, activated, T, F, layer->activation);
    product(&layer->weights[DOWN_W], activated, out);
    free(normed), free(gates), free(activated);
}

/* Sums over ranks, then norm, factor and residual. */
static void end_apart(int n, float *found[]) {
    const i64 count = step.T * E;
    for (i64 i = 0; num_ranks > 1 && i < count; i++) {
        float sum = found[0][i] + found[1][i];
        for (int rank = 2; rank < num_ranks; rank++) sum += found[rank][i];
        for (int rank = 0; rank < num_ranks; rank++) found[rank][i] = sum;
    }
    for (int rank = 0; rank < num_ranks; rank++) {
        const Layer *layer = &ranks[rank].layers[n];
        if (layer->post != NULL) rms_norm(found[rank], layer->post, found[rank], step.T, E, 1e-6f, 0.0f);
        for (i64 i = 0; i < count; i++) ranks[rank].x[APART][i] += found[rank][i] * layer->factor;
    }
}

static void run_apart(void) {
    float *found[MOST_RANKS];
    for (int rank = 0; rank < num_ranks; rank++) found[rank] = exactly(step.T * E * 4);
    for (int n = 0; n < LAYERS; n++)
        for (int half = 0; half < 2; half++) {
            for (int rank = 0; rank < num_ranks; rank++) {
                const Layer *layer = &ranks[rank].layers[n];
                (half ? feed_forward_apart : attention_apart)(layer, ranks[rank].x[APART], found[rank]);
            }
            end_apart(n, found);
        }
    for (int rank = 0; rank < num_ranks; rank++) free(found[rank]);
}

/* As a program. */

/* Adds an op whose buffers are named by address: `bind` makes offsets of them. */
static Op *add(Rank *rank, int op, int layer, int place, const float *in, const float *out, const float *residual) {
    Op *found = &rank->ops[rank->program.num_ops++];
    *found = (Op){.op = op, .layer = layer, .place = place, .in = (i64)(intptr_t)in, .out = (i64)(intptr_t)out,
                  .residual = residual == NULL ? -1 : (i64)(intptr_t)residual, .activation = -1, .rotary = -1, .factor = 1.0f};
    return found;
}

static Op *add_product(Rank *rank, int layer, int place, const Weight *w, const float *norm, const float *in, const float *out,
                       const float *residual) {
    Op *op = add(rank, PRODUCT, layer, place, in, out, residual);
    op->kind = w->kind, op->type = w->type, op->weight = w->packed, op->scale = w->scale, op->bias = w->bias;
    op->I = w->I, op->O = op->stride = w->O, op->block = w->block, op->norm = norm, op->eps = 1e-6f, op->offset = 0.5f;
    return op;
}

static float *buffer(Rank *rank, i64 width) {
    float *found = exactly(step.T * width * 4);
    memset(found, 0xff, (size_t)(step.T * width) * 4); /* NaN, which nothing may read */
    rank->buffers[rank->num_buffers++] = found;
    return found;
}

/* Adds the last product of half a layer, and what follows it. Returns where the result is. */
static float *add_end(Rank *rank, int n, int place, const Weight *w, const float *in, const float *x) {
    const Layer *layer = &rank->layers[n];
    float *out = buffer(rank, E);
    if (num_ranks == 1 && layer->post == NULL) {
        add_product(rank, n, place, w, NULL, in, out, x)->factor = layer->factor;
        return out;
    }
    add_product(rank, n, place, w, NULL, in, out, NULL);
    if (num_ranks > 1) add(rank, REDUCE, n, place, out, NULL, NULL)->I = E;
    Op *ends = add(rank, ADD, n, place, out, out, x);
    ends->I = E, ends->norm = layer->post, ends->eps = 1e-6f, ends->factor = layer->factor;
    return out;
}

static float *add_attention(Rank *rank, int n, const float *x) {
    const Layer *layer = &rank->layers[n];
    float *qkv = buffer(rank, QKV), *attended = buffer(rank, H * D);
    add_product(rank, n, PLACE_QKV, &layer->weights[QKV_W], layer->norms[0], x, qkv, NULL);
    Op *stores = add(rank, STORE, n, PLACE_QKV, qkv, NULL, NULL);
    stores->O = QKV, stores->H = H, stores->K = K, stores->D = D, stores->C = C, stores->rotary = 0, stores->eps = 1e-5f;
    stores->query_norm = layer->query_norm, stores->key_norm = layer->key_norm;
    Op *attends = add(rank, ATTEND, n, PLACE_ATTENTION, qkv, attended, NULL);
    attends->factor = 0.2f, attends->cap = layer->cap, attends->sinks = layer->sinks;
    for (Op *op = stores; op <= attends; op++) op->group = layer->group, op->pages = layer->pages[IN_STEP], op->half = layer->half;
    return add_end(rank, n, PLACE_O, &layer->weights[O_W], attended, x);
}

static float *add_feed_forward(Rank *rank, int n, const float *x) {
    const Layer *layer = &rank->layers[n];
    float *gates = buffer(rank, 2 * F), *activated = buffer(rank, F);
    Op *up = add_product(rank, n, PLACE_GATE_UP, &layer->weights[UP_W], layer->norms[1], x, gates, layer->gated ? activated : NULL);
    if (layer->gated) up->gated = 1, up->activation = layer->activation;
    else {
        Op *activates = add(rank, ACTIVATE, n, PLACE_GATE_UP, gates, activated, NULL);
        activates->gated = 1;
        activates->I = F, activates->activation = layer->activation;
    }
    return add_end(rank, n, PLACE_DOWN, &layer->weights[DOWN_W], activated, x);
}

/* Makes offsets from the lowest buffer of the addresses: to the program all are in one arena. */
static void bind(Rank *rank) {
    float *lowest = rank->buffers[0];
    for (int n = 1; n < rank->num_buffers; n++)
        if ((intptr_t)rank->buffers[n] < (intptr_t)lowest) lowest = rank->buffers[n];
    for (i64 n = 0; n < rank->program.num_ops; n++) {
        i64 *places[] = {&rank->ops[n].in, &rank->ops[n].out, &rank->ops[n].residual};
        for (int place = 0; place < 3; place++)
            if (*places[place] > 0) *places[place] = (*places[place] - (i64)(intptr_t)lowest) / 4;
    }
    rank->program.arena = lowest;
}

static float *build(Rank *rank) {
    rank->program = (Program){.ops = rank->ops, .num_groups = GROUPS, .threads = num_threads, .most_inputs = E, .most_row_bytes = 64 + 48 * 9 + E,
                              .smallest = FLT_MIN, .meeting = num_ranks > 1 ? &rank->meeting : NULL};
    float *x = rank->buffers[0] = rank->x[IN_STEP];
    rank->num_buffers = 1;
    for (int n = 0; n < LAYERS; n++) x = add_feed_forward(rank, n, add_attention(rank, n, x));
    bind(rank);
    return x;
}

/* Runs some ops. The program gets the memory that it asks for, and the meetings are resumed. */
static void run_ops(Rank *rank, i64 first, i64 last) {
    Program *program = &rank->program;
    for (int again = 0;;) {
        const int status = run_step(program, &step, first, last, again);
        if (status == MEETING_OK) return;
        if (status == STEP_SHORT) {
            free(program->memory);
            program->memory = some(program->needed_bytes), program->memory_bytes = program->needed_bytes;
        } else if (status == MEETING_AGAIN) first = program->reached, again = 1, rank->resumed++;
        else fail("a meeting failed", rank->number, status);
    }
}

static void *run_rank(void *given) {
    Rank *rank = given;
    float *out = build(rank);
    const i64 num_ops = rank->program.num_ops, late_at = rank->late_at % num_ops;
    if (rank->late_at < 0) run_ops(rank, 0, num_ops);
    else {
        run_ops(rank, 0, late_at);
        nanosleep(&(struct timespec){0, LATE_MS * 1000000}, NULL);
        run_ops(rank, late_at, num_ops);
    }
    memcpy(rank->x[IN_STEP], out, (size_t)(step.T * E) * 4);
    for (int n = 1; n < rank->num_buffers; n++) free(rank->buffers[n]);
    free(rank->program.memory);
    if (rank->board[BOARD_PLACE] != 0) fail("the board shows a layer after the step", rank->number, (i64)rank->board[BOARD_PLACE]);
    return NULL;
}

static void compare(int number) {
    for (int rank = 0; rank < num_ranks; rank++) {
        float *const *x = ranks[rank].x;
        for (i64 i = 0; i < step.T * E; i++)
            if (!(x[APART][i] > -1e4f && x[APART][i] < 1e4f)) fail("a number is no use", rank, i);
        if (memcmp(x[IN_STEP], x[APART], (size_t)(step.T * E) * 4)) fail("other numbers in step", rank, number);
        for (int n = 0; n < LAYERS; n++) {
            const Layer *layer = &ranks[rank].layers[n];
            if (memcmp(layer->pages[IN_STEP], layer->pages[APART], SLOTS_N * C * (layer->half ? 2 : 4))) fail("another cache in step", rank, number);
        }
    }
}

static void run_together(int number) {
    pthread_t started[MOST_RANKS];
    float *x = numbers(step.T * E, 0, 1);
    for (int rank = 0; rank < num_ranks; rank++) {
        for (int way = 0; way < WAYS; way++) ranks[rank].x[way] = memcpy(exactly(step.T * E * 4), x, (size_t)(step.T * E) * 4);
        ranks[rank].late_at = num_ranks > 1 && rank == number % num_ranks ? (int)draw() : -1;
        pthread_create(&started[rank], NULL, run_rank, &ranks[rank]);
    }
    for (int rank = 0; rank < num_ranks; rank++) pthread_join(started[rank], NULL);
    run_apart();
    compare(number);
    free(x);
    for (int rank = 0; rank < num_ranks; rank++)
        for (int way = 0; way < WAYS; way++) free(ranks[rank].x[way]);
}

int main(int argc, char **argv) {
    if (argc < 3) return 3;
    num_ranks = atoi(argv[1]), num_threads = atoi(argv[2]);
    if (num_ranks > MOST_RANKS) return 3;
    omp_set_num_threads(num_threads);
    const i64 bytes = PAGE + (i64)num_ranks * SLOTS;
    char *segment = memset(aligned_alloc(PAGE, (size_t)bytes), 0, (size_t)bytes);
    for (int rank = 0; rank < num_ranks; rank++) {
        ranks[rank].number = rank;
        ranks[rank].meeting = (Meeting){.flags = (Word *)segment, .slots = segment + PAGE, .board = ranks[rank].board, .rank = rank,
                                        .size = num_ranks, .spin_ns = 10000, .yield_ns = 1000000, .deadline_ns = 60000000000,
                                        .epoch_end = (Word)1 << 40};
        for (int n = 0; n < LAYERS; n++) make_layer(&ranks[rank].layers[n], n);
    }
    i64 length[SEQUENCES] = {0};
    for (int number = 0; number < STEPS; number++) {
        begin_step(number, length);
        run_together(number);
    }
    long resumed = 0;
    for (int rank = 0; rank < num_ranks; rank++) resumed += ranks[rank].resumed;
    printf("equal, %ld resumed\n", resumed);
    return 0;
}
