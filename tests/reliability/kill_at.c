/* For LD_PRELOAD: end the process with SIGKILL at its n-th system call on files below run/ or cache/.

   KILL_AT      a letter, r(ename) f(sync) u(nlink) o(pen) w(rite) or a(ny), and n, such as r7: die
                before the seventh rename. A write dies after half of its bytes.
   KILL_LOG     a file that gets the letter of each call. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static int calls;

/* Return whether the process has to die in this call. */
static int now(char kind, const char *path) {
    const char *at = getenv("KILL_AT"), *log = getenv("KILL_LOG");
    if (strncmp(path, "run/", 4) && !strstr(path, "/run/") && !strstr(path, "/cache/"))
        return 0;
    if (log) {
        int file = syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND, 0644);
        syscall(SYS_write, file, &kind, 1);
        syscall(SYS_close, file);
    }
    if (!at || (at[0] != kind && at[0] != 'a'))
        return 0;
    return __atomic_add_fetch(&calls, 1, __ATOMIC_SEQ_CST) == atoi(at + 1);
}

static int now_for_file(char kind, int file) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0)
        return 0;
    path[length] = 0;
    return now(kind, path);
}

static void die(void) {
    for (;;)
        kill(getpid(), SIGKILL);
}

#define REAL(result, name, ...) \
    static result (*real)(__VA_ARGS__); \
    if (!real) \
        real = (result(*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)

int rename(const char *from, const char *to) {
    REAL(int, "rename", const char *, const char *);
    if (now('r', to))
        die();
    return real(from, to);
}

int unlink(const char *path) {
    REAL(int, "unlink", const char *);
    if (now('u', path))
        die();
    return real(path);
}

int fsync(int file) {
    REAL(int, "fsync", int);
    if (now_for_file('f', file))
        die();
    return real(file);
}

ssize_t write(int file, const void *data, size_t size) {
    REAL(ssize_t, "write", int, const void *, size_t);
    if (now_for_file('w', file)) {
        real(file, data, size / 2);
        die();
    }
    return real(file, data, size);
}

#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        va_list rest; \
        va_start(rest, flags); \
        int mode = flags & O_CREAT ? va_arg(rest, int) : 0; \
        va_end(rest); \
        REAL(int, #name, const char *, int, ...); \
        if (now('o', path)) \
            die(); \
        return real(path, flags, mode); \
    }
OPEN(open)
OPEN(open64)
