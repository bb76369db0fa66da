/* SPDX-License-Identifier: Apache-2.0
 *
 * What runs in the pods of the stories: a CUDA program without CUDA's runtime. It finds the driver as
 * programs do (dlopen of libcuda.so.1), takes memory, and prints one line of JSON for each thing it was told.
 * It knows nothing of shares, hooks or fakes, which is the point of it.
 */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum {
	EXIT_REFUSED = 3,
	EXIT_NO_DRIVER = 4,
	EXIT_OVER = 5,
	OUT_OF_MEMORY = 2,
	MAX_HELD = 64,
	MAX_PROCESSES = 256
};

/* The driver's entry points that are used here, by the names that the library exports. */
static struct driver {
	int (*init)(unsigned int flags);
	int (*count)(int *count);
	int (*name)(char *name, int length, int device);
	int (*uuid)(unsigned char uuid[16], int device);
	int (*total)(size_t *bytes, int device);
	int (*retain)(void **context, int device);
	int (*current)(void *context);
	int (*info)(size_t *free, size_t *total);
	int (*allocate)(uint64_t *address, size_t bytes);
	int (*release)(uint64_t address);
	int (*error_name)(int code, const char **name);
} driver;

static const struct {
	const char *symbol;
	size_t offset;
} entry_points[] = {
    {"cuInit", offsetof(struct driver, init)},
    {"cuDeviceGetCount", offsetof(struct driver, count)},
    {"cuDeviceGetName", offsetof(struct driver, name)},
    {"cuDeviceGetUuid", offsetof(struct driver, uuid)},
    {"cuDeviceTotalMem_v2", offsetof(struct driver, total)},
    {"cuDevicePrimaryCtxRetain", offsetof(struct driver, retain)},
    {"cuCtxSetCurrent", offsetof(struct driver, current)},
    {"cuMemGetInfo_v2", offsetof(struct driver, info)},
    {"cuMemAlloc_v2", offsetof(struct driver, allocate)},
    {"cuMemFree_v2", offsetof(struct driver, release)},
    {"cuGetErrorName", offsetof(struct driver, error_name)},
};

static const char *name_of(int code)
{
	const char *name = NULL;

	if (driver.error_name(code, &name) || !name)
		return "unknown";
	return name;
}

static int fail(const char *what, const char *why, int code)
{
	printf("{\"event\":\"failed\",\"what\":\"%s\",\"why\":\"%s\",\"code\":%d}\n", what, why, code);
	return EXIT_NO_DRIVER;
}

static int load_driver(void)
{
	void *library = dlopen("libcuda.so.1", RTLD_NOW);
	int code;

	if (!library)
		return fail("dlopen", "libcuda.so.1 cannot be loaded", 0);
	for (size_t i = 0; i < sizeof(entry_points) / sizeof(*entry_points); i++) {
		void *found = dlsym(library, entry_points[i].symbol);

		if (!found)
			return fail("dlsym", entry_points[i].symbol, 0);
		memcpy((char *)&driver + entry_points[i].offset, &found, sizeof(found));
	}
	code = driver.init(0);
	return code ? fail("cuInit", name_of(code), code) : 0;
}

static int use_device(int device)
{
	void *context = NULL;
	int code = driver.retain(&context, device);

	if (!code)
		code = driver.current(context);
	return code ? fail("cuDevicePrimaryCtxRetain", name_of(code), code) : 0;
}

/* "1536Mi", "4Gi" or plain bytes; 0 for what is no size. */
static uint64_t parse_size(const char *text)
{
	char *end = NULL;
	uint64_t value = strtoull(text, &end, 10);

	if (!strcmp(end, "Ki"))
		return value << 10;
	if (!strcmp(end, "Mi"))
		return value << 20;
	if (!strcmp(end, "Gi"))
		return value << 30;
	return *end ? 0 : value;
}

static void print_uuid(int device)
{
	unsigned char raw[16] = {0};

	driver.uuid(raw, device);
	printf("GPU-");
	for (int i = 0; i < 16; i++)
		printf("%s%02x", i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", raw[i]);
}

static int show(void)
{
	int count = 0, code = load_driver();

	if (code)
		return code;
	code = driver.count(&count);
	if (code)
		return fail("cuDeviceGetCount", name_of(code), code);
	printf("{\"event\":\"show\",\"devices\":[");
	for (int i = 0; i < count; i++) {
		char name[128] = "";
		size_t all = 0, unused = 0, total = 0;

		driver.name(name, sizeof(name), i);
		driver.total(&total, i);
		printf("%s{\"ordinal\":%d,\"name\":\"%s\",\"uuid\":\"", i ? "," : "", i, name);
		print_uuid(i);
		if (use_device(i) || driver.info(&unused, &all))
			return EXIT_NO_DRIVER;
		printf("\",\"device_total\":%zu,\"total\":%zu,\"free\":%zu}", total, all, unused);
	}
	printf("]}\n");
	return 0;
}

static void wait_for_end(void)
{
	sigset_t end;
	int number;

	sigemptyset(&end);
	sigaddset(&end, SIGTERM);
	sigaddset(&end, SIGINT);
	sigprocmask(SIG_BLOCK, &end, NULL);
	printf("{\"event\":\"holding\",\"pid\":%d}\n", (int)getpid());
	fflush(stdout);
	sigwait(&end, &number);
}

/* alloc [--device N] [--hold] SIZE…: one line each; the status says whether the last one was refused. */
static int allocate(int argc, char **argv)
{
	int device = 0, code = load_driver();
	bool hold = false, ready = false;

	if (code)
		return code;
	for (int i = 0; i < argc; i++) {
		size_t unused = 0, total = 0;
		uint64_t address = 0, bytes;

		if (!strcmp(argv[i], "--hold")) {
			hold = true;
			continue;
		}
		if (!strcmp(argv[i], "--device") && i + 1 < argc) {
			device = atoi(argv[++i]);
			ready = false;
			continue;
		}
		bytes = parse_size(argv[i]);
		if (!ready && (code = use_device(device)))
			return code;
		ready = true;
		code = driver.allocate(&address, bytes);
		driver.info(&unused, &total);
		printf("{\"event\":\"alloc\",\"device\":%d,\"asked\":%" PRIu64
		       ",\"code\":%d,\"result\":\"%s\","
		       "\"free\":%zu,\"total\":%zu}\n",
		       device, bytes, code, name_of(code), unused, total);
		fflush(stdout);
	}
	if (hold)
		wait_for_end();
	return code == 0 ? 0 : code == OUT_OF_MEMORY ? EXIT_REFUSED : EXIT_NO_DRIVER;
}

static uint64_t now_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* wait-free SIZE MILLISECONDS: until an allocation of that size succeeds; prints how long that took. */
static int wait_free(const char *size, const char *milliseconds)
{
	uint64_t start, limit = strtoull(milliseconds, NULL, 10) * 1000000u, bytes = parse_size(size),
			address = 0;
	struct timespec pause_for = {.tv_nsec = 2000000};
	int code = load_driver();

	if (code || (code = use_device(0)))
		return code;
	start = now_ns();
	printf("{\"event\":\"waiting\"}\n");
	fflush(stdout);
	while ((code = driver.allocate(&address, bytes)) && now_ns() - start < limit)
		nanosleep(&pause_for, NULL);
	printf("{\"event\":\"waited\",\"code\":%d,\"result\":\"%s\",\"ms\":%.1f}\n", code, name_of(code),
	       (double)(now_ns() - start) / 1e6);
	return code ? EXIT_REFUSED : 0;
}

/* What all racing processes, in all containers that map the file, add up to. Counted after an allocation has
 * succeeded and before a release begins, so it is never more than what is really held: more than the limit
 * here is more than the limit in truth. */
struct tally {
	_Atomic uint64_t held;
	_Atomic uint64_t peak;
	_Atomic uint64_t allocations;
	_Atomic uint64_t refused;
	_Atomic uint64_t broken;
};

static void count_up(struct tally *tally, uint64_t bytes)
{
	uint64_t held = atomic_fetch_add(&tally->held, bytes) + bytes;
	uint64_t peak = atomic_load(&tally->peak);

	while (held > peak && !atomic_compare_exchange_weak(&tally->peak, &peak, held))
		;
}

static void race_once(struct tally *tally, uint64_t allocations, uint64_t largest, unsigned int seed)
{
	struct {
		uint64_t address, bytes;
	} held[MAX_HELD];
	size_t live = 0;

	if (load_driver() || use_device(0)) {
		atomic_fetch_add(&tally->broken, 1);
		return;
	}
	for (uint64_t asked = 0; asked < allocations;) {
		bool take = live == 0 || (live < MAX_HELD && rand_r(&seed) % 100 < 60);

		if (take) {
			/* Odd sizes too: what the driver rounds up must be charged rounded. */
			uint64_t bytes = 1 + (((uint64_t)(unsigned int)rand_r(&seed) << 16) ^
					      (unsigned int)rand_r(&seed)) %
						 largest;
			int code = driver.allocate(&held[live].address, bytes);

			asked++;
			atomic_fetch_add(&tally->allocations, 1);
			if (!code) {
				held[live++].bytes = bytes;
				count_up(tally, bytes);
			} else if (code == OUT_OF_MEMORY) {
				atomic_fetch_add(&tally->refused, 1);
			} else {
				atomic_fetch_add(&tally->broken, 1);
			}
		} else {
			size_t victim = (size_t)rand_r(&seed) % live;

			atomic_fetch_sub(&tally->held, held[victim].bytes);
			if (driver.release(held[victim].address))
				atomic_fetch_add(&tally->broken, 1);
			held[victim] = held[--live];
		}
	}
	while (live--) {
		atomic_fetch_sub(&tally->held, held[live].bytes);
		driver.release(held[live].address);
	}
}

/* race PROCESSES ALLOCATIONS LARGEST LIMIT SEED [FILE]: each process takes and gives back at random until it
 * has asked that often. */
static int race(int argc, char **argv)
{
	unsigned int processes = (unsigned int)atoi(argv[0]), seed = (unsigned int)atoi(argv[4]), broken = 0;
	uint64_t allocations = strtoull(argv[1], NULL, 10), largest = parse_size(argv[2]),
		 limit = parse_size(argv[3]);
	int file = argc > 5 ? open(argv[5], O_RDWR | O_CREAT, 0666) : -1;
	struct tally *tally;

	if (processes == 0 || processes > MAX_PROCESSES || largest == 0)
		return fail("race", "wrong numbers", 0);
	if (argc > 5 && (file < 0 || ftruncate(file, sizeof(*tally))))
		return fail("open", strerror(errno), errno);
	tally = mmap(NULL, sizeof(*tally), PROT_READ | PROT_WRITE,
		     file < 0 ? MAP_SHARED | MAP_ANONYMOUS : MAP_SHARED, file, 0);
	if (tally == MAP_FAILED)
		return fail("mmap", strerror(errno), errno);
	fflush(stdout);
	for (unsigned int i = 0; i < processes; i++) {
		pid_t child = fork();

		if (child == 0) {
			race_once(tally, allocations, largest, seed * 1000 + i);
			fflush(stdout);
			_exit(0);
		}
		if (child < 0)
			broken++;
	}
	for (int status; wait(&status) > 0;)
		broken += !WIFEXITED(status) || WEXITSTATUS(status) != 0;
	broken += (unsigned int)atomic_load(&tally->broken);
	printf("{\"event\":\"race\",\"allocations\":%" PRIu64 ",\"refused\":%" PRIu64 ",\"peak\":%" PRIu64
	       ",\"limit\":%" PRIu64 ",\"left\":%" PRIu64 ",\"broken\":%u}\n",
	       atomic_load(&tally->allocations), atomic_load(&tally->refused), atomic_load(&tally->peak),
	       limit, atomic_load(&tally->held), broken);
	return broken ? EXIT_FAILURE : limit && atomic_load(&tally->peak) > limit ? EXIT_OVER : 0;
}

int main(int argc, char **argv)
{
	if (argc == 2 && !strcmp(argv[1], "show"))
		return show();
	if (argc > 2 && !strcmp(argv[1], "alloc"))
		return allocate(argc - 2, argv + 2);
	if (argc == 4 && !strcmp(argv[1], "wait-free"))
		return wait_free(argv[2], argv[3]);
	if ((argc == 7 || argc == 8) && !strcmp(argv[1], "race"))
		return race(argc - 2, argv + 2);
	if (argc == 2 && !strcmp(argv[1], "idle")) {
		wait_for_end();
		return 0;
	}
	fprintf(
	    stderr,
	    "use: workload show | idle | alloc [--device N] [--hold] SIZE… | wait-free SIZE MILLISECONDS |\n"
	    "     race PROCESSES ALLOCATIONS LARGEST LIMIT SEED [FILE]\n");
	return 64;
}
