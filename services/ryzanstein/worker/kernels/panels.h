/* Divides products with a packed weight into tiles whose sums fit the registers.

   A weight is packed in panels: as many outputs as a register has lanes, all their inputs one after the other. A tile is some
   rows times some panels. A thread has its own panels, and multiplies all rows with a few of them while these are in the L2 cache.

   Legend: T rows, I inputs, O outputs. */

#ifndef RYZANSTEIN_PANELS_H
#define RYZANSTEIN_PANELS_H

#include <omp.h>

#include "lanes.h"

#if LANES == 16 /* 32 registers: 24 sums, 4 of a weight, a row's number */
#define TILE_ROWS 6
#define TILE_PANELS 4
#else
#define TILE_ROWS 3
#define TILE_PANELS 2
#endif
#define TILE_SINGLE (2 * TILE_PANELS) /* panels for a single row: so many sums at once hide the latency of an instruction */

INLINE i64 whole(i64 number, i64 of) { return (number + of - 1) / of * of; }

/* Multiplies inputs `begin` to `end` - 1 of rows from t on with panels from `panel` on. */
typedef void AddTile(const void *product, i64 t, i64 panel, i64 begin, i64 end, const int rows, const int panels);

INLINE void add_rows(AddTile *add, const void *product, i64 T, i64 panel, i64 begin, i64 end, const int panels) {
    for (i64 t = 0, rows; t < T; t += rows) {
        i64 tiles = (T - t + TILE_ROWS - 1) / TILE_ROWS;
        rows = (T - t + tiles - 1) / tiles; /* as even as possible */
        switch (rows) {
#if TILE_ROWS == 6
        case 6: add(product, t, panel, begin, end, 6, panels); break;
        case 5: add(product, t, panel, begin, end, 5, panels); break;
        case 4: add(product, t, panel, begin, end, 4, panels); break;
#endif
        case 3: add(product, t, panel, begin, end, 3, panels); break;
        case 2: add(product, t, panel, begin, end, 2, panels); break;
        case 1: add(product, t, panel, begin, end, 1, panels); break;
        }
    }
}

INLINE void add_panels(AddTile *add, const void *product, i64 T, i64 panel, i64 begin, i64 end, i64 panels) {
    switch (panels) {
#if TILE_PANELS == 4
    case 8: add(product, 0, panel, begin, end, 1, 8); break;
    case 7: add(product, 0, panel, begin, end, 1, 7); break;
    case 6: add(product, 0, panel, begin, end, 1, 6); break;
    case 5: add(product, 0, panel, begin, end, 1, 5); break;
    case 4: add_rows(add, product, T, panel, begin, end, 4); break;
    case 3: add_rows(add, product, T, panel, begin, end, 3); break;
#else
    case 4: add(product, 0, panel, begin, end, 1, 4); break;
    case 3: add(product, 0, panel, begin, end, 1, 3); break;
#endif
    case 2: add_rows(add, product, T, panel, begin, end, 2); break;
    case 1: add_rows(add, product, T, panel, begin, end, 1); break;
    }
}

/* All rows times panels `panel` to `last` - 1, `block` inputs at a time. */
INLINE void add_some(AddTile *add, const void *product, i64 T, i64 panel, i64 last, i64 num_inputs, i64 block) {
    i64 most = T == 1 ? TILE_SINGLE : TILE_PANELS, tiles = (last - panel + most - 1) / most;
    for (; tiles > 0; tiles--) {
        i64 panels = (last - panel + tiles - 1) / tiles;
        for (i64 i = 0; i < num_inputs; i += block)
            add_panels(add, product, T, panel, i, i + block < num_inputs ? i + block : num_inputs, panels);
        panel += panels;
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
