/* SPDX-License-Identifier: Apache-2.0
 *
 * See view.h; offsets in hook.md 1.6 are those of struct aq_view. HAMi's monitor adds up the slots that are
 * in use, card by card; so each slot of a share writes into the slot of the same number, at its card's place.
 */
#include "view.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "early.h"
#include "sigbus.h"

#define MAGIC         19920718
#define DEVICES       16u
#define SLOTS         1024u
#define UUID_LENGTH   96u
#define ACCOUNTS_AT   (2u << 20)
#define STANDARD_PATH "/tmp/cudevshr.cache"

struct used {
	uint64_t context;
	uint64_t module;
	uint64_t data;
	uint64_t offset;
	uint64_t total;
	uint64_t spare[3];
};

struct slot {
	int32_t pid;
	int32_t hostpid;
	struct used used[DEVICES];
	uint64_t monitor_used[DEVICES];
	uint64_t utilisation[DEVICES][6];
	int32_t status;
	int32_t pad;
	uint64_t seqlock;
	uint64_t spare[2];
};

struct aq_view {
	int32_t magic;
	uint32_t major;
	uint32_t minor;
	int32_t sm_init;
	uint64_t owner_pid;
	uint8_t semaphore[32];
	uint64_t devices;
	char uuid[DEVICES][UUID_LENGTH];
	uint64_t limit[DEVICES];
	uint64_t sm_limit[DEVICES];
	struct slot slot[SLOTS];
	int32_t slots;
	int32_t utilization_switch;
	int32_t recent_kernel;
	int32_t priority;
	int64_t last_kernel_time;
	uint8_t spare[32];
};

_Static_assert(offsetof(struct aq_view, uuid) == 64, "HAMi's region: uuids");
_Static_assert(offsetof(struct aq_view, limit) == 1600, "HAMi's region: limits");
_Static_assert(offsetof(struct aq_view, slot) == 1856, "HAMi's region: slots");
_Static_assert(sizeof(struct slot) == 1960, "HAMi's region: size of a slot");
_Static_assert(offsetof(struct slot, status) == 1928, "HAMi's region: status");
_Static_assert(offsetof(struct aq_view, slots) == 2008896, "HAMi's region: number of slots");
_Static_assert(sizeof(struct aq_view) == 2008952, "HAMi's region: size");
_Static_assert(sizeof(struct aq_view) < ACCOUNTS_AT, "our accounts begin behind HAMi's region");

#define WHOLE (ACCOUNTS_AT + (size_t)DEVICES * AQ_USAGE_FILE_SIZE)

AQ_EARLY struct aq_view *aq_view_word;

/* Opens or makes the file and gives it at least the size we need. */
static int open_region(const char *path)
{
	int flags = O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY;
	int fd = open(path, flags | O_CREAT | O_EXCL, 0666);
	bool made = fd >= 0;
	struct stat stat;
	if (!made)
		fd = open(path, flags);
	if (fd < 0)
		return -1;
	/* For every user of the container, whatever the umask of the first one. */
	if ((made && fchmod(fd, 0666) < 0) || syscall(SYS_fstat, fd, &stat) < 0 || !S_ISREG(stat.st_mode) ||
	    (stat.st_size < (off_t)WHOLE && ftruncate(fd, (off_t)WHOLE) < 0)) {
		close(fd);
		return -1;
	}
	return fd;
}

void aq_view_open(bool make)
{
	const char *path = getauxval(AT_SECURE) ? NULL : getenv("CUDA_DEVICE_MEMORY_SHARED_CACHE");
	if (aq_view_word || (path == NULL && !make))
		return;
	int saved = errno;
	int fd = open_region(path && *path ? path : STANDARD_PATH);
	if (fd >= 0) {
		struct aq_view *view = mmap(NULL, WHOLE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
		close(fd);
		if (view != MAP_FAILED) {
			aq_sigbus_guard(view, WHOLE);
			view->major = 1;
			view->minor = 2;
			__atomic_store_n(&view->magic, MAGIC, __ATOMIC_RELEASE);
			__atomic_store_n(&aq_view_word, view, __ATOMIC_RELEASE);
		}
	}
	errno = saved;
}

struct aq_usage_file *aq_view_account(unsigned index)
{
	char *view = (char *)aq_view_word;
	if (view == NULL || index >= DEVICES)
		return NULL;
	return (struct aq_usage_file *)(void *)(view + ACCOUNTS_AT + (size_t)index * AQ_USAGE_FILE_SIZE);
}

void aq_view_describe(unsigned index, const CUuuid *uuid, uint64_t memory, uint32_t cores, uint32_t priority)
{
	static const char digits[] = "0123456789abcdef";
	struct aq_view *view = aq_view_word;
	if (view == NULL || index >= DEVICES)
		return;
	char *next = view->uuid[index];
	memcpy(next, "GPU-", 4);
	next += 4;
	for (unsigned i = 0; i < sizeof(uuid->bytes); i++) {
		if (i == 4 || i == 6 || i == 8 || i == 10)
			*next++ = '-';
		*next++ = digits[uuid->bytes[i] >> 4];
		*next++ = digits[uuid->bytes[i] & 15];
	}
	*next = '\0';
	view->limit[index] = memory;
	view->sm_limit[index] = cores;
	view->priority = (int32_t)priority;
	if (view->devices <= index)
		view->devices = index + 1;
}

void aq_view_describe_grants(void)
{
	for (unsigned number = 0; aq_view_word && number < aq_card_count; number++) {
		const struct aq_card *card = &aq_cards[number];
		uint64_t units = 0;
		uint32_t cores = 0, priority = 1;
		for (uint32_t i = 0; i < card->share_count; i++) {
			const struct aq_share *share = &aq_shares[card->share[i]];
			uint64_t limit = __atomic_load_n(&share->limit, __ATOMIC_RELAXED);
			units = limit == AQ_UNLIMITED || units == AQ_UNLIMITED ? AQ_UNLIMITED : units + limit;
			cores += __atomic_load_n(&share->core_percent, __ATOMIC_RELAXED);
			if (__atomic_load_n(&share->priority, __ATOMIC_RELAXED) == 0)
				priority = 0;
		}
		aq_view_describe(number, &card->uuid, units == AQ_UNLIMITED ? 0 : units << AQ_UNIT_SHIFT,
				 cores, priority);
	}
}

/* Place of a share's card in the region. */
static unsigned device_of(const struct aq_share *share)
{
	if (share->standalone_index >= 0)
		return (unsigned)share->standalone_index;
	for (unsigned card = 0; card < aq_card_count && card < DEVICES; card++)
		for (uint32_t i = 0; i < aq_cards[card].share_count; i++)
			if (aq_cards[card].share[i] == share->index)
				return card;
	return DEVICES;
}

static void write_slot(struct aq_view *view, unsigned device, uint32_t index,
		       const struct aq_usage_slot *slot)
{
	struct used *used = &view->slot[index].used[device];
	uint64_t total = aq_word_units(__atomic_load_n(&slot->charge, __ATOMIC_RELAXED)) << AQ_UNIT_SHIFT;
	uint64_t context = __atomic_load_n(&slot->context_bytes, __ATOMIC_RELAXED);
	context = context < total ? context : total;
	__atomic_store_n(&used->context, context, __ATOMIC_RELAXED);
	__atomic_store_n(&used->data, total - context, __ATOMIC_RELAXED);
	__atomic_store_n(&used->total, total, __ATOMIC_RELAXED);
	if (view->slot[index].status == 0 && total > 0) {
		view->slot[index].pid = (int32_t)(slot->owner & AQ_OWNER_PID_MASK);
		__atomic_store_n(&view->slot[index].status, 1, __ATOMIC_RELEASE);
		int32_t slots = __atomic_load_n(&view->slots, __ATOMIC_RELAXED);
		while (slots <= (int32_t)index &&
		       !__atomic_compare_exchange_n(&view->slots, &slots, (int32_t)index + 1, false,
						    __ATOMIC_RELAXED, __ATOMIC_RELAXED))
			;
	}
}

void aq_view_write(const struct aq_share *share, const struct aq_usage_slot *slot)
{
	unsigned device = device_of(share);
	size_t index = (size_t)((const char *)slot - share->account.slots) / share->account.slot_size;
	if (device < DEVICES && index < SLOTS)
		write_slot(aq_view_word, device, (uint32_t)index, slot);
}

void aq_view_refresh(const struct aq_share *share)
{
	unsigned device = device_of(share);
	uint32_t used = aq_account_used_slots(&share->account);
	if (aq_view_word == NULL || device >= DEVICES)
		return;
	for (uint32_t i = 0; i < used && i < SLOTS; i++)
		write_slot(aq_view_word, device, i, aq_account_slot(&share->account, i));
}
