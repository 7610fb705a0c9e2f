/* What attention is asked, and how the threads of a team answer it.

   Strides and widths are in floats. The legend is that of attention.c. */

#ifndef RYZANSTEIN_ATTENTION_TEAM_H
#define RYZANSTEIN_ATTENTION_TEAM_H

#include "lanes.h"

typedef struct {
    const float *q_T;         /* queries of a token: K x G x D, `q_stride` apart */
    const char *pages_NC;     /* a hot slot: keys of K heads, and values of K heads from `values` on */
    const char *cold;         /* cold blocks (attention_pages.h); or NULL */
    const i64 *rows_S;        /* a sequence's first new token in the step */
    const i64 *num_new_S;     /* number of a sequence's new tokens, its last keys */
    const i64 *length_S;      /* numbers of keys */
    const i64 *tables_SB;     /* hot pages, from page first_S on (NULL: 0) */
    const i64 *first_S;
    const i64 *cold_tables_SB, *cold_first_S;
    const i64 *begin_S, *end_S; /* the keys that count, by position; or NULL: all */
    const float *bias_HP;     /* added to the scores of a head by the key's position; or NULL */
    const float *sink_H;      /* of each head a score that has no value; or NULL */
    const float *bounds;      /* of each block the least keys of all heads, then the greatest; or NULL */
    float *out_T;             /* as queries, `out_stride` apart */
    float *lse_TH;            /* logarithms of sums of exponentials of scores; or NULL */
    i64 q_stride, out_stride, C, values, B, cold_B, block_size, S, K, G, D, P;
    i64 half;                 /* whether hot slots hold float16 */
    i64 key_kind, value_kind; /* of cold blocks */
    i64 hot;                  /* a page is cold for a query whose position is at least so much greater than the page's last */
    i64 window;               /* the most keys that a token sees, itself included; 0: all */
    i64 sparse;               /* whether older keys are seen besides (attention_sparse.h) */
    i64 sinks, stride, quest; /* pages; 0: none */
    float scale, cap;         /* scores: times scale, and squashed between -cap and cap if cap > 0 */
} Attention;

/* A call that is divided into tasks for a team of so many threads. Layers with the same tables and sizes may share it. */
typedef struct Call Call;
i64 attend_tasks_bytes(const Attention *a);
Call *attend_divide(const Attention *a, char *memory, i64 threads); /* `memory`: of `attend_tasks_bytes` */
i64 attend_work_bytes(const Call *call, i64 threads);
void attend_open(const Attention *a, Call *call, char *work);      /* `work`: of `attend_work_bytes` */

/* Called by every thread of the team. The answers are there when the last of them returns: it does not wait for the others. */
void attend_team(const Attention *a, const Call *call);

#endif
