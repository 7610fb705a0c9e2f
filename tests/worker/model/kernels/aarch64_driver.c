/* Calls functions of a library of kernels for 64-bit Arm, under emulation: reads calls from stdin, writes results to stdout.

   The memory of a call's arguments is a file that both processes map. A call: a name of 32 bytes; the number of threads; places
   in the file that hold a pointer; integer arguments; two float32. A pointer is an offset in the file. Numbers are int64.

   Arm's calling convention puts integers into registers x0 to x7 and then into slots of 8 bytes, and floats into others, whatever
   the order of both: so one type of function serves all (Procedure Call Standard for the Arm 64-bit Architecture, 6.8.2). */

#include <dlfcn.h>
#include <fcntl.h>
#include <omp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>

typedef int64_t i64;
typedef i64 Function(i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, float, float);

enum { MOST_INTEGERS = 16 };

static void get(void *to, i64 size) {
    if (size > 0 && fread(to, (size_t)size, 1, stdin) != 1) exit(feof(stdin) ? 0 : 1);
}

static i64 number(void) {
    i64 value;
    get(&value, sizeof value);
    return value;
}

static void fail(const char *why) {
    fprintf(stderr, "aarch64_driver: %s\n", why);
    exit(1);
}

static char *map(const char *path) {
    struct stat status;
    int file = open(path, O_RDWR);
    if (file < 0 || fstat(file, &status) != 0) fail("no memory file");
    char *memory = mmap(NULL, (size_t)status.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (memory == MAP_FAILED) fail("the memory file cannot be mapped");
    return memory;
}

int main(int count, char **arguments) {
    if (count != 3) fail("usage: aarch64_driver LIBRARY MEMORY");
    void *library = dlopen(arguments[1], RTLD_NOW);
    if (library == NULL) fail(dlerror());
    char *memory = map(arguments[2]);
    for (;;) {
        char name[32];
        get(name, sizeof name);
        Function *function = (Function *)dlsym(library, name);
        if (function == NULL) fail(dlerror());
        omp_set_num_threads((int)number());
        for (i64 left = number(); left > 0; left--) {
            i64 at = number();
            *(char **)(memory + at) = memory + number();
        }
        i64 x[MOST_INTEGERS] = {0}, integers = number();
        if (integers > MOST_INTEGERS) fail("too many arguments");
        for (i64 n = 0; n < integers; n++) {
            i64 points = number(), value = number();
            x[n] = points ? (i64)(intptr_t)(memory + value) : value;
        }
        float f[2];
        get(f, sizeof f);
        i64 result = function(x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7], x[8], x[9], x[10], x[11], x[12], x[13], x[14], x[15],
                              f[0], f[1]);
        fwrite(&result, sizeof result, 1, stdout);
        fflush(stdout);
    }
}
