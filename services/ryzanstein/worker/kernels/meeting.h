/* Where ranks meet: an all-reduce over the shared memory of `collectives/shm.py`, in its protocol, and the rank's slot of the
   progress board. So each collective of each rank may be Python's or this one.

   An all-reduce by one thread is `meeting_all_reduce`. By all threads of an OpenMP region it is `meeting_reduce_together`,
   which every thread calls, or, where `meeting_is_simple`, these pieces without a copy:

     1. every thread   writes its part of the operand to `meeting_slot`
     2.                a barrier of the threads
     3. one thread     `meeting_wait`, whose status the others read after
     4.                a barrier of the threads
     5. every thread   if the status is 0, `meeting_sum` of any columns, each once
     6. one thread     `meeting_done`, at any time after 3

   A barrier of the threads must lie between 5 and the next 3; the next 1 may follow at once.

   A status other than 0 ends the step. MEETING_AGAIN asks for the same call once more, with `again`, after what waited
   in the process: handlers of signals run in the interpreter, so a wait never lasts longer than 50 ms. What was
   written to the slot stays there. With the others the operand is lost: Python raises what `failure` makes of it. */

#ifndef RYZANSTEIN_MEETING_H
#define RYZANSTEIN_MEETING_H

#include <stdint.h>

typedef uint64_t Word;

enum { MEETING_OK, MEETING_AGAIN, MEETING_TIMED_OUT, MEETING_GAVE_UP, MEETING_OUT_OF_STEP };

/* As `collectives/meeting.py` declares it. Times are in nanoseconds. */
typedef struct {
    Word *flags;                           /* the first page of the segment */
    char *slots;                           /* two for each rank, by rank */
    Word *board;                           /* this rank's slot of the board, or NULL */
    int64_t rank, size;                    /* ranks; a single one meets nobody and uses the board alone */
    int64_t spin_ns, yield_ns, deadline_ns;
    Word arrivals, epoch_end, parity;      /* of the last operation */
    int64_t peer, bytes, waited_ns;        /* who is waited for in a chunk of so many bytes; how long, after a time-out */
    int64_t first, stage;                  /* of the all-reduce that waits: the chunk's first number, and what it waits for */
    int64_t began_ns, returns_ns, status;  /* of the wait; when the call returns; what the thread that waited returns */
} Meeting;

/* What a rank computes, as the board shows it. `collectives/meeting.py` has their names. */
enum { PLACE_NONE, PLACE_EMBEDDING, PLACE_NORM, PLACE_QKV, PLACE_ATTENTION, PLACE_O, PLACE_GATE_UP, PLACE_DOWN, PLACE_HEAD };
enum { BOARD_PLACE = 21, BOARD_NO_LAYER = -1 };

/* Tells the board what the rank computes now. PLACE_NONE without a layer when the step ends. */
static inline void meeting_at(const Meeting *meeting, int64_t layer, int place) {
    if (meeting->board) __atomic_store_n(meeting->board + BOARD_PLACE, (Word)(layer + 1) << 8 | (Word)place, __ATOMIC_RELAXED);
}

int meeting_all_reduce(Meeting *meeting, float *values, int64_t count, int again);
int meeting_reduce_together(Meeting *meeting, float *values, int64_t count, int again);

int meeting_is_simple(const Meeting *meeting, int64_t count); /* one arrival, one chunk */
float *meeting_slot(const Meeting *meeting);                  /* where this rank's operand of the next all-reduce belongs */
int meeting_wait(Meeting *meeting, int64_t count, int again);
void meeting_sum(const Meeting *meeting, float *out, int64_t begin, int64_t end); /* out[i] for column i */
void meeting_done(Meeting *meeting);

#endif
