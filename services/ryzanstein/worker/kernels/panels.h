/* Divides products with a packed weight into tiles whose sums fit the registers.

   A weight is packed in panels: as many outputs as a register has lanes, all their inputs one after the other. A tile is some
   rows times some panels. A thread has its own panels, and multiplies all rows with a few of them while these are in the L2 cache.

   Legend: T rows, I inputs, O outputs. */

#ifndef RYZANSTEIN_PANELS_H
#define RYZANSTEIN_PANELS_H

#include <omp.h>

#include "lanes.h"

#if LANES == 16 /* 32 registers: 24 sums, 4 of a weight, a row's number */
enum { TILE_ROWS = 6, TILE_PANELS = 4, FEW_ROWS = 1 };
#elif LANES == 8 && defined(__AVX2__) /* 16 registers: 12 sums, 2 of a weight, a row's number */
enum { TILE_ROWS = 6, TILE_PANELS = 2, FEW_ROWS = 2 };
#else
enum { TILE_ROWS = 3, TILE_PANELS = 2, FEW_ROWS = 1 };
#endif
enum { TILE_SINGLE = 2 * TILE_PANELS };  /* panels for FEW_ROWS: so many sums at once hide the latency of an instruction */
enum { PANEL_AHEAD = 4096, ASKS = LANES == 8 }; /* bytes of a panel that the first rows ask for in advance, where it was faster */

INLINE i64 whole(i64 number, i64 of) { return (number + of - 1) / of * of; }

/* The first of as few parts of a number as possible that are at most `most`, as even as possible. */
INLINE i64 even_part(i64 number, i64 most) {
    i64 parts = (number + most - 1) / most;
    return (number + parts - 1) / parts;
}

/* Asks for vectors that will be multiplied a little later than vector `at` of each panel: those AHEAD, and near the end of the
   panels the first ones of the next panels. The CPU itself asks for too little while it multiplies several rows. `count`: vectors
   of a panel, of some `bytes`. */
INLINE void ask_panels(const void *first, i64 at, i64 count, const int bytes, const int panels) {
    const i64 ahead = PANEL_AHEAD / bytes < count ? PANEL_AHEAD / bytes : count;
    const char *next = (const char *)first + (at + ahead + (at + ahead < count ? 0 : (panels - 1) * count)) * bytes;
#pragma GCC unroll 8
    for (int n = 0; n < panels; n++) __builtin_prefetch(next + n * count * bytes);
}

/* Multiplies inputs `begin` to `end` - 1 of rows from t on with panels from `panel` on. */
typedef void AddTile(const void *product, i64 t, i64 panel, i64 begin, i64 end, const int rows, const int panels);

INLINE void add_rows(AddTile *add, const void *product, i64 T, i64 panel, i64 begin, i64 end, const int panels) {
    const int most = panels > TILE_PANELS ? FEW_ROWS : TILE_ROWS;
    for (i64 t = 0, rows; t < T; t += rows) {
        rows = even_part(T - t, most);
        switch (rows) {
#define OF_ROWS(ROWS) case ROWS: if (ROWS <= most) add(product, t, panel, begin, end, ROWS, panels); break;
            OF_ROWS(1) OF_ROWS(2) OF_ROWS(3) OF_ROWS(4) OF_ROWS(5) OF_ROWS(6)
        }
    }
}

INLINE void add_panels(AddTile *add, const void *product, i64 T, i64 panel, i64 begin, i64 end, i64 panels) {
    switch (panels) {
#define OF_PANELS(PANELS)                                                                                                       \
    case PANELS: if (PANELS <= TILE_SINGLE) add_rows(add, product, T, panel, begin, end, PANELS); break;
        OF_PANELS(1) OF_PANELS(2) OF_PANELS(3) OF_PANELS(4) OF_PANELS(5) OF_PANELS(6) OF_PANELS(7) OF_PANELS(8)
    }
}

/* All rows times panels `panel` to `last` - 1, `block` inputs at a time. */
INLINE void add_some(AddTile *add, const void *product, i64 T, i64 panel, i64 last, i64 num_inputs, i64 block) {
    for (i64 panels; panel < last; panel += panels) {
        panels = even_part(last - panel, T <= FEW_ROWS ? TILE_SINGLE : TILE_PANELS);
        for (i64 i = 0; i < num_inputs; i += block)
            add_panels(add, product, T, panel, i, i + block < num_inputs ? i + block : num_inputs, panels);
    }
}

/* Returns the first panel of this thread's share, and the first one of the next thread's. */
INLINE i64 first_panel(i64 num_panels, i64 *last) {
    i64 thread = omp_get_thread_num(), threads = omp_get_num_threads();
    *last = num_panels * (thread + 1) / threads;
    return num_panels * thread / threads;
}

/* All rows times this thread's share of the panels. Called by every thread of a team. */
INLINE void add_share(AddTile *add, const void *product, i64 T, i64 num_panels, i64 num_inputs, i64 block) {
    i64 last, panel = first_panel(num_panels, &last);
    add_some(add, product, T, panel, last, num_inputs, block);
}

#endif
