/* Time that passes faster, for the processes that preload this library: every clock and every wait of theirs.
 *
 * The processes share one page, mapped from a file. It says how far their clocks are ahead of the machine's, since when, and
 * how many times as fast they run. Wall and monotonic clocks are ahead by the same, so nothing that compares times of two
 * processes notices. A wait takes its time divided by the rate that there was when it began; one until an absolute time is
 * translated. Clocks of processor time stay: work takes what it takes.
 *
 * Waits are: epoll, poll, select, sleeps, semaphores and conditions (locks of Python), futexes through syscall(2) (locks of
 * gRPC). Timer file descriptors and alarms are not: nothing here uses them.
 */
#include "clock.h"
#include <errno.h>
#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/epoll.h>
#include <sys/select.h>
#include <sys/syscall.h>

#define SECOND 1000000000LL
#define FOR_EVER (INT64_MAX / 2)
#define ONE 1000
/* A monotonic time is not so great, a wall time is greater: tells the clock of an absolute time. */
#define WALL_FROM (1000000000LL * SECOND)

/* Written by fast_clock.py, under `sequence`: odd while it is being written. `since` and `ahead` are nanoseconds, `rate` is in
 * thousandths. */
struct page {
    _Atomic uint64_t sequence;
    _Atomic int64_t since, ahead, rate;
};

static struct page *page;

__attribute__((constructor)) static void map_page(void) {
    page = shared_page("RYZANSTEIN_FAST_CLOCK", sizeof *page);
}

/* The function that this one stands before. Conditions have an older version, which dlsym may find. */
#define NEXT(result, name, ...) \
    static result (*next)(__VA_ARGS__); \
    if (next == NULL) next = (result (*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)
#define NEXT_CONDITION(name, ...) \
    static int (*next)(__VA_ARGS__); \
    if (next == NULL) next = (int (*)(__VA_ARGS__))dlvsym(RTLD_NEXT, name, "GLIBC_2.3.2"); \
    if (next == NULL) next = (int (*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)

static int64_t nanoseconds(const struct timespec *time) {
    return time->tv_sec > FOR_EVER / SECOND ? FOR_EVER : time->tv_sec * SECOND + time->tv_nsec;
}

static struct timespec timespec_of(int64_t time) {
    if (time < 0) time = 0;
    return (struct timespec){.tv_sec = time / SECOND, .tv_nsec = time % SECOND};
}

static int64_t machine_now(clockid_t clock) {
    struct timespec now;
    machine_time(clock, &now);
    return nanoseconds(&now);
}

/* How far we are ahead of the machine now, and how many times as fast. */
static int64_t ahead(int64_t *rate) {
    for (;;) {
        uint64_t before = atomic_load_explicit(&page->sequence, memory_order_acquire);
        int64_t since = page->since, base = page->ahead;
        *rate = page->rate;
        atomic_thread_fence(memory_order_acquire);
        if (before % 2 || before != atomic_load_explicit(&page->sequence, memory_order_relaxed)) continue;
        return *rate == ONE ? base : base + (machine_now(CLOCK_MONOTONIC) - since) * (*rate - ONE) / ONE;
    }
}

static int64_t rate_now(void) { return page == NULL ? ONE : page->rate; }

static int is_ours(clockid_t clock) {
    return clock == CLOCK_REALTIME || clock == CLOCK_MONOTONIC || clock == CLOCK_MONOTONIC_RAW || clock == CLOCK_BOOTTIME ||
           clock == CLOCK_REALTIME_COARSE || clock == CLOCK_MONOTONIC_COARSE;
}

static int64_t slowed(int64_t interval, int64_t rate) { return rate == ONE ? interval : (int64_t)((double)interval * ONE / rate); }

/* An interval of ours in the machine's time; never nothing, where it was something. */
static struct timespec shortened(const struct timespec *interval) {
    int64_t given = nanoseconds(interval), shorter = slowed(given, rate_now());
    return timespec_of(given > 0 && shorter == 0 ? 1 : shorter);
}

/* A time of ours in the machine's. */
static struct timespec translated(const struct timespec *time) {
    int64_t rate, until = nanoseconds(time), is_ahead = ahead(&rate);
    int64_t now = machine_now(until > WALL_FROM ? CLOCK_REALTIME : CLOCK_MONOTONIC);
    return timespec_of(now + slowed(until - is_ahead - now, rate));
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int64_t rate;
    int failed = machine_time(clock, now);
    if (!failed && page != NULL && is_ours(clock)) *now = timespec_of(nanoseconds(now) + ahead(&rate));
    return failed;
}

/* Milliseconds of ours in the machine's time: NULL for ever. They are too coarse for what is left of them. */
static struct timespec *milliseconds(int timeout, struct timespec *shorter) {
    if (timeout < 0) return NULL;
    *shorter = timespec_of((int64_t)timeout * 1000000);
    *shorter = shortened(shorter);
    return shorter;
}

int epoll_pwait2(int epoll, struct epoll_event *events, int most, const struct timespec *timeout, const sigset_t *mask) {
    NEXT(int, "epoll_pwait2", int, struct epoll_event *, int, const struct timespec *, const sigset_t *);
    struct timespec shorter;
    if (timeout != NULL && rate_now() != ONE) shorter = shortened(timeout), timeout = &shorter;
    return next(epoll, events, most, timeout, mask);
}

int epoll_pwait(int epoll, struct epoll_event *events, int most, int timeout, const sigset_t *mask) {
    NEXT(int, "epoll_pwait", int, struct epoll_event *, int, int, const sigset_t *);
    static int (*precise)(int, struct epoll_event *, int, const struct timespec *, const sigset_t *);
    struct timespec shorter;
    if (timeout <= 0 || rate_now() == ONE) return next(epoll, events, most, timeout, mask);
    if (precise == NULL) precise = dlsym(RTLD_NEXT, "epoll_pwait2");
    /* An older C library has none: then a wait is one millisecond at least. */
    if (precise == NULL) return next(epoll, events, most, 1 + (int)slowed(timeout, rate_now()), mask);
    return precise(epoll, events, most, milliseconds(timeout, &shorter), mask);
}

int epoll_wait(int epoll, struct epoll_event *events, int most, int timeout) {
    return epoll_pwait(epoll, events, most, timeout, NULL);
}

int ppoll(struct pollfd *files, nfds_t many, const struct timespec *timeout, const sigset_t *mask) {
    NEXT(int, "ppoll", struct pollfd *, nfds_t, const struct timespec *, const sigset_t *);
    struct timespec shorter;
    if (timeout != NULL && rate_now() != ONE) shorter = shortened(timeout), timeout = &shorter;
    return next(files, many, timeout, mask);
}

int poll(struct pollfd *files, nfds_t many, int timeout) {
    NEXT(int, "ppoll", struct pollfd *, nfds_t, const struct timespec *, const sigset_t *);
    struct timespec shorter;
    return next(files, many, milliseconds(timeout, &shorter), NULL);
}

int pselect(int many, fd_set *in, fd_set *out, fd_set *odd, const struct timespec *timeout, const sigset_t *mask) {
    NEXT(int, "pselect", int, fd_set *, fd_set *, fd_set *, const struct timespec *, const sigset_t *);
    struct timespec shorter;
    if (timeout != NULL) shorter = shortened(timeout), timeout = &shorter;
    return next(many, in, out, odd, timeout, mask);
}

int select(int many, fd_set *in, fd_set *out, fd_set *odd, struct timeval *timeout) {
    struct timespec exact;
    if (timeout == NULL) return pselect(many, in, out, odd, NULL, NULL);
    exact = timespec_of(timeout->tv_sec * SECOND + (int64_t)timeout->tv_usec * 1000);
    return pselect(many, in, out, odd, &exact, NULL);
}

int clock_nanosleep(clockid_t clock, int flags, const struct timespec *until, struct timespec *left) {
    NEXT(int, "clock_nanosleep", clockid_t, int, const struct timespec *, struct timespec *);
    struct timespec ours;
    if (page == NULL || !is_ours(clock)) return next(clock, flags, until, left);
    ours = flags & TIMER_ABSTIME ? translated(until) : shortened(until);
    int failed = next(clock, flags, &ours, left);
    if (failed == EINTR && left != NULL && !(flags & TIMER_ABSTIME)) *left = timespec_of(nanoseconds(left) * rate_now() / ONE);
    return failed;
}

int nanosleep(const struct timespec *interval, struct timespec *left) {
    int failed = clock_nanosleep(CLOCK_MONOTONIC, 0, interval, left);
    if (!failed) return 0;
    errno = failed;
    return -1;
}

int usleep(useconds_t interval) {
    struct timespec exact = timespec_of((int64_t)interval * 1000);
    return nanosleep(&exact, NULL);
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict until) {
    NEXT(int, "sem_timedwait", sem_t *, const struct timespec *);
    struct timespec ours;
    if (page != NULL) ours = translated(until), until = &ours;
    return next(semaphore, until);
}

int sem_clockwait(sem_t *restrict semaphore, clockid_t clock, const struct timespec *restrict until) {
    NEXT(int, "sem_clockwait", sem_t *, clockid_t, const struct timespec *);
    struct timespec ours;
    if (page != NULL) ours = translated(until), until = &ours;
    return next(semaphore, clock, until);
}

int pthread_cond_timedwait(
    pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex, const struct timespec *restrict until) {
    NEXT_CONDITION("pthread_cond_timedwait", pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    struct timespec ours;
    if (page != NULL) ours = translated(until), until = &ours;
    return next(condition, mutex, until);
}

int pthread_cond_clockwait(
    pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex, clockid_t clock, const struct timespec *restrict until) {
    NEXT(int, "pthread_cond_clockwait", pthread_cond_t *, pthread_mutex_t *, clockid_t, const struct timespec *);
    struct timespec ours;
    if (page != NULL) ours = translated(until), until = &ours;
    return next(condition, mutex, clock, until);
}

/* Of the system calls that are made by number only a futex's wait has a time in it. Words that were not given are passed on
 * as whatever they are; the kernel does not look at them. */
long syscall(long number, ...) {
    NEXT(long, "syscall", long, ...);
    va_list given;
    long words[6];
    struct timespec ours;
    va_start(given, number);
    for (int i = 0; i < 6; i++) words[i] = va_arg(given, long);
    va_end(given);
    if (number == SYS_futex && page != NULL && words[3] != 0) {
        const struct timespec *time = (const struct timespec *)words[3];
        switch (words[1] & FUTEX_CMD_MASK) {
            case FUTEX_WAIT: ours = shortened(time), words[3] = (long)&ours; break;
            case FUTEX_WAIT_BITSET: ours = translated(time), words[3] = (long)&ours; break;
        }
    }
    return next(number, words[0], words[1], words[2], words[3], words[4], words[5]);
}
