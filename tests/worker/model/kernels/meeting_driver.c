/* Ranks that meet, as threads of one process: `meeting_driver RANKS THREADS`. Each all-reduce of each rank is computed in one of
   three ways, by THREADS threads of an OpenMP region. It ends with 1 at the first sum that is not that of the operands in rank
   order. Compiled with a sanitizer, it also ends with the first fault. */

#define _POSIX_C_SOURCE 200809L

#include "meeting.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_RANKS = 4, PAGE = 4096, SLOTS = 2 << 20, ROUNDS = 4, BOARD_WORDS = 4096 };
static const int64_t COUNTS[] = {0, 1, 7, 2048, 16383, 16384, 16387, 262144, 262145, 600001};

static int ranks, threads;
static char *segment;

static float operand(int64_t rank, int64_t i, int round) { return (float)((i * 7919 + rank * 104729 + round * 31) % 1000003) / 977.0f; }

static int in_pieces(Meeting *meeting, const float *values, float *out, int64_t count, int again) {
    int status = 0;
#pragma omp parallel num_threads(threads) shared(status)
    {
        float *slot = meeting_slot(meeting);
        if (!again) {
#pragma omp for
            for (int64_t i = 0; i < count; i++) slot[i] = values[i];
        }
#pragma omp master
        status = meeting_wait(meeting, count, again);
#pragma omp barrier
        if (!status) {
#pragma omp for
            for (int64_t part = 0; part < 5; part++) meeting_sum(meeting, out, count * part / 5, count * (part + 1) / 5);
#pragma omp master
            meeting_done(meeting);
        }
    }
    return status;
}

static int together(Meeting *meeting, float *values, int64_t count, int again) {
    int result = 0;
#pragma omp parallel num_threads(threads)
    {
        int status = meeting_reduce_together(meeting, values, count, again);
#pragma omp master
        result = status;
    }
    return result;
}

static int sum(Meeting *meeting, float *values, int64_t count, int way, int again) {
    if (way == 1) return together(meeting, values, count, again);
    if (way == 2 && meeting_is_simple(meeting, count)) return in_pieces(meeting, values, values, count, again);
    return meeting_all_reduce(meeting, values, count, again);
}

static int is_wrong(const float *values, int64_t count, int round) {
    for (int64_t i = 0; i < count; i++) {
        float expected = operand(0, i, round) + operand(1, i, round);
        for (int64_t rank = 2; rank < ranks; rank++) expected += operand(rank, i, round);
        if (memcmp(&expected, values + i, sizeof(float))) return 1;
    }
    return 0;
}

static void *run(void *given) {
    int64_t rank = (int64_t)(intptr_t)given, sums = 0;
    Word board[BOARD_WORDS] = {0};
    Meeting meeting = {.flags = (Word *)segment, .slots = segment + PAGE, .board = board, .rank = rank, .size = ranks,
                       .spin_ns = 10000, .yield_ns = 1000000, .deadline_ns = 60000000000, .epoch_end = (Word)1 << 40};
    unsigned draw = 12345u + (unsigned)rank;
    float *values = malloc(600001 * sizeof(float));
    for (int round = 0; round < ROUNDS; round++)
        for (size_t n = 0; n < sizeof(COUNTS) / sizeof(COUNTS[0]); n++) {
            int64_t count = COUNTS[n];
            for (int64_t i = 0; i < count; i++) values[i] = operand(rank, i, round);
            draw = draw * 1103515245u + 12345u;
            int way = (int)(draw >> 16) % 3, status = sum(&meeting, values, count, way, 0);
            while (status == MEETING_AGAIN) status = sum(&meeting, values, count, way, 1);
            if (status || is_wrong(values, count, round)) {
                fprintf(stderr, "rank %d: %d numbers, way %d, status %d\n", (int)rank, (int)count, way, status);
                exit(1);
            }
            sums++;
        }
    free(values);
    if (board[2] != (Word)sums || board[16] != (Word)sums) exit(2);
    return NULL;
}

int main(int argc, char **argv) {
    pthread_t started[MOST_RANKS];
    if (argc < 3) return 3;
    ranks = atoi(argv[1]);
    threads = atoi(argv[2]);
    segment = aligned_alloc(PAGE, PAGE + (size_t)ranks * SLOTS);
    memset(segment, 0, PAGE + (size_t)ranks * SLOTS);
    for (int64_t rank = 0; rank < ranks; rank++) pthread_create(&started[rank], NULL, run, (void *)(intptr_t)rank);
    for (int rank = 0; rank < ranks; rank++) pthread_join(started[rank], NULL);
    free(segment);
    printf("equal\n");
    return 0;
}
