/* An all-reduce of float32 among the ranks of one machine; see meeting.h. Nothing here allocates.

   A rank writes its operand to its slot and then publishes its arrival; a rank that has seen the arrival may read the slot. So
   arrivals are stored with release and read with acquire semantics, which also holds where stores have no total order. */

#define _POSIX_C_SOURCE 200809L

#include "meeting.h"

#include <omp.h>
#include <sched.h>
#include <string.h>
#include <time.h>

typedef int64_t i64;

/* As in collectives/segment.py and collectives/shm.py. */
enum { STRIDE = 64 / sizeof(Word), SLOT_BYTES = 1 << 20, SLOT_FLOATS = SLOT_BYTES / sizeof(float), SLOTS_PER_RANK = 2 };
enum { SPLIT_BYTES = 64 * 1024, KIND = 1 };
enum { SLEEP_NS = 200 * 1000, TURN_NS = 50 * 1000 * 1000 };
/* As in ranks/health/board.py and rings.py. */
enum { COLLECTIVE = 2, PROGRESS_NS = 3, PHASE = 7, COLLECTIVES_NS = 9, RECORDED = 16 };
enum { EPOCH = 22, WHAT, ARRIVED_NS, LONGEST_NS, LONGEST, OUTER };
enum { RING = 32 + 64 * 8, RING_RECORDS = 512, RECORD_WORDS = 4, OP_BITS = 8, OP_CODE = 1 };

enum { WRITING, MEETING, EXCHANGING }; /* the stages of a chunk */
enum { COLUMNS = 2048 };               /* summed at once: they stay in the first cache */

static Word get(const Word *word) { return __atomic_load_n(word, __ATOMIC_RELAXED); }
static void set(Word *word, Word value) { __atomic_store_n(word, value, __ATOMIC_RELAXED); }
static void publish(Word *word, Word value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }
static Word arrival(const Word *flag) { return __atomic_load_n(flag, __ATOMIC_ACQUIRE); }

static i64 clock_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000 + now.tv_nsec;
}

static void pause_core(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* The size of the struct, which Python compares with its own. */
i64 meeting_bytes(void) { return sizeof(Meeting); }

/* As RankBoard.begin. */
static void board_begin(Word *board, i64 bytes) {
    static const char name[16] = "all_reduce";
    Word phase[2];
    if (!board) return;
    memcpy(phase, name, sizeof(phase));
    set(board + PHASE, phase[0]);
    set(board + PHASE + 1, phase[1]);
    set(board + COLLECTIVE, get(board + COLLECTIVE) + 1);
    set(board + WHAT, (Word)bytes << OP_BITS | OP_CODE);
    Word now = (Word)clock_ns();
    set(board + ARRIVED_NS, now);
    set(board + PROGRESS_NS, now);
}

/* As RingWriter.write. */
static void board_record(Word *board, Word number, Word left) {
    Word *record = board + RING + number % RING_RECORDS * RECORD_WORDS;
    set(record, 0);
    publish(record + 1, get(board + WHAT));
    publish(record + 2, get(board + ARRIVED_NS));
    publish(record + 3, left);
    publish(record, number);
    set(board + RECORDED, number);
}

/* As RankBoard.end. */
static void board_end(Word *board) {
    if (!board) return;
    set(board + PHASE, get(board + OUTER));
    set(board + PHASE + 1, get(board + OUTER + 1));
    Word now = (Word)clock_ns(), spent = now - get(board + ARRIVED_NS), count = get(board + COLLECTIVE);
    set(board + PROGRESS_NS, now);
    set(board + COLLECTIVES_NS, get(board + COLLECTIVES_NS) + spent);
    if (spent > get(board + LONGEST_NS)) {
        set(board + LONGEST_NS, spent);
        set(board + LONGEST, count << OP_BITS | OP_CODE);
    }
    board_record(board, get(board + EPOCH) + count, now);
}

static float *slot_of(const Meeting *meeting, i64 rank, Word parity) {
    return (float *)(meeting->slots + (rank * SLOTS_PER_RANK + (i64)parity) * SLOT_BYTES);
}

static int is_split(const Meeting *meeting, i64 count) { return meeting->size > 2 && count * 4 >= SPLIT_BYTES; }

int meeting_is_simple(const Meeting *meeting, i64 count) { return count <= SLOT_FLOATS && !is_split(meeting, count); }

float *meeting_slot(const Meeting *meeting) { return slot_of(meeting, meeting->rank, meeting->parity ^ 1); }

/* Waits for one rank: it spins, then yields the core, then sleeps, as collectives/waiting.py. */
static int await(Meeting *meeting, const Word *flag) {
    if (arrival(flag) >= meeting->arrivals) return MEETING_OK;
    i64 now = clock_ns(), spins = meeting->spin_ns > 0 ? 8 : 1;
    if (!meeting->began_ns) meeting->began_ns = now;
    if (!meeting->returns_ns) meeting->returns_ns = now + TURN_NS;
    for (;;) {
        for (i64 n = 0; n < spins; n++) {
            if (arrival(flag) >= meeting->arrivals) return MEETING_OK;
            pause_core();
        }
        now = clock_ns();
        i64 waited = now - meeting->began_ns;
        if (waited < meeting->spin_ns) continue;
        if (waited >= meeting->yield_ns && waited >= meeting->deadline_ns) {
            meeting->waited_ns = waited;
            return MEETING_TIMED_OUT;
        }
        if (now >= meeting->returns_ns) return MEETING_AGAIN;
        if (waited < meeting->yield_ns) sched_yield();
        else nanosleep(&(struct timespec){0, SLEEP_NS}, NULL);
    }
}

/* Publishes that this rank has arrived with `count` numbers in its slot. */
static void arrive(Meeting *meeting, i64 count) {
    Word *mine = meeting->flags + meeting->rank * STRIDE;
    meeting->bytes = count * 4;
    meeting->peer = meeting->began_ns = 0;
    meeting->arrivals++;
    set(mine + 1 + (meeting->arrivals & 1), (Word)meeting->bytes << 2 | KIND);
    publish(mine, meeting->arrivals);
}

/* Waits for every rank in turn, and checks that all are in this operation. */
static int await_all(Meeting *meeting) {
    meeting->returns_ns = 0;
    for (; meeting->peer < meeting->size; meeting->peer++, meeting->began_ns = 0) {
        const Word *theirs = meeting->flags + meeting->peer * STRIDE;
        int status = await(meeting, theirs);
        if (status) return status;
        if (arrival(theirs) >= meeting->epoch_end) return MEETING_GAVE_UP;
        if (get(theirs + 1 + (meeting->arrivals & 1)) != ((Word)meeting->bytes << 2 | KIND)) return MEETING_OUT_OF_STEP;
    }
    return MEETING_OK;
}

static void add(const float *a, const float *b, float *restrict out, i64 count) {
    for (i64 i = 0; i < count; i++) out[i] = a[i] + b[i];
}

void meeting_sum(const Meeting *meeting, float *out, i64 begin, i64 end) {
    Word parity = meeting->parity;
    for (i64 i = begin; i < end; i += COLUMNS) {
        i64 count = end - i < COLUMNS ? end - i : COLUMNS;
        add(slot_of(meeting, 0, parity) + i, slot_of(meeting, 1, parity) + i, out + i, count);
        for (i64 rank = 2; rank < meeting->size; rank++) {
            const float *restrict from = slot_of(meeting, rank, parity) + i;
            float *restrict to = out + i;
            for (i64 n = 0; n < count; n++) to[n] += from[n];
        }
    }
}

int meeting_wait(Meeting *meeting, i64 count, int again) {
    if (!again) {
        board_begin(meeting->board, count * 4);
        meeting->parity ^= 1;
        arrive(meeting, count);
    }
    return (int)(meeting->status = await_all(meeting));
}

void meeting_done(Meeting *meeting) { board_end(meeting->board); }

/* Where the share of one of `parts` begins, as torch's `tensor_split` has it: the first ones have one more. */
static i64 share(i64 count, i64 part, i64 parts) {
    i64 rest = count % parts;
    return part * (count / parts) + (part < rest ? part : rest);
}

/* A thread of the region that computes the all-reduce, and the chunk that they are in. */
typedef struct {
    Meeting *meeting;
    float *values;
    i64 count, thread, threads;
} Chunk;

static void barrier(const Chunk *chunk) {
    if (chunk->threads > 1) {
#pragma omp barrier
    }
}

/* Thread 0 waits; all return how that ended. The status is written again only after one more barrier. */
static int meet(const Chunk *chunk, i64 first, i64 stage, int arrived) {
    Meeting *meeting = chunk->meeting;
    barrier(chunk);
    if (chunk->thread == 0) {
        if (!arrived) {
            if (stage == MEETING) meeting->parity ^= 1;
            arrive(meeting, chunk->count);
        }
        meeting->first = first;
        meeting->stage = stage;
        meeting->status = await_all(meeting);
    }
    barrier(chunk);
    return (int)meeting->status;
}

static void copy(float *to, const float *from, i64 begin, i64 end) {
    if (begin < end) memcpy(to + begin, from + begin, (size_t)(end - begin) * sizeof(float));
}

/* Sums this rank's part of the columns. The sum overwrites the operand in the rank's own slot: no other rank reads that
   part of it. */
static void sum_part(const Chunk *chunk) {
    const Meeting *meeting = chunk->meeting;
    i64 first = share(chunk->count, meeting->rank, meeting->size);
    i64 width = share(chunk->count, meeting->rank + 1, meeting->size) - first;
    i64 begin = first + share(width, chunk->thread, chunk->threads), end = first + share(width, chunk->thread + 1, chunk->threads);
    meeting_sum(meeting, chunk->values, begin, end);
    copy(slot_of(meeting, meeting->rank, meeting->parity), chunk->values, begin, end);
}

/* Copies what the other ranks have summed. */
static void take_parts(const Chunk *chunk) {
    const Meeting *meeting = chunk->meeting;
    for (i64 rank = 0; rank < meeting->size; rank++) {
        i64 first = share(chunk->count, rank, meeting->size), width = share(chunk->count, rank + 1, meeting->size) - first;
        i64 begin = first + share(width, chunk->thread, chunk->threads);
        i64 end = first + share(width, chunk->thread + 1, chunk->threads);
        if (rank != meeting->rank) copy(chunk->values, slot_of(meeting, rank, meeting->parity), begin, end);
    }
}

/* One chunk, from a stage on in which this rank has arrived already unless it is WRITING. */
static int reduce_chunk(const Chunk *chunk, i64 first, i64 stage, int split) {
    Meeting *meeting = chunk->meeting;
    i64 begin = share(chunk->count, chunk->thread, chunk->threads), end = share(chunk->count, chunk->thread + 1, chunk->threads);
    int status;
    if (stage == WRITING) copy(meeting_slot(meeting), chunk->values, begin, end);
    if (stage != EXCHANGING) {
        if ((status = meet(chunk, first, MEETING, stage == MEETING))) return status;
        if (!split) {
            meeting_sum(meeting, chunk->values, begin, end);
            return MEETING_OK;
        }
        sum_part(chunk);
    }
    if ((status = meet(chunk, first, EXCHANGING, stage == EXCHANGING))) return status;
    take_parts(chunk);
    return MEETING_OK;
}

static int reduce(Meeting *meeting, float *values, i64 count, int again, i64 thread, i64 threads) {
    i64 first = again ? meeting->first : 0, stage = again ? meeting->stage : WRITING;
    if (thread == 0 && !again) board_begin(meeting->board, count * 4);
    do {
        i64 left = count - first;
        Chunk chunk = {meeting, values + first, left < SLOT_FLOATS ? left : SLOT_FLOATS, thread, threads};
        int status = reduce_chunk(&chunk, first, stage, is_split(meeting, count));
        if (status) return status;
        first += chunk.count;
        stage = WRITING;
    } while (first < count);
    if (thread == 0) board_end(meeting->board);
    return MEETING_OK;
}

int meeting_all_reduce(Meeting *meeting, float *values, i64 count, int again) { return reduce(meeting, values, count, again, 0, 1); }

/* Sums in place, by all threads of the region. It begins with a barrier, and each thread returns with its own columns summed;
   so a barrier must follow before others read them. */
int meeting_reduce_together(Meeting *meeting, float *values, i64 count, int again) {
    return reduce(meeting, values, count, again, omp_get_thread_num(), omp_get_num_threads());
}
