/* SPDX-License-Identifier: Apache-2.0
 *
 * Making the shared state from the configuration. See state_make.h.
 */
#include "state_make.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "account.h"
#include "process.h"
#include "uuid.h"

#define MAX_CONFIG_BYTES (16u << 20)

static uint64_t round_page(uint64_t bytes)
{
	return (bytes + 4095) & ~UINT64_C(4095);
}

uint64_t fg_state_build(void)
{
	const uint64_t sizes[] = {sizeof(struct fg_state), sizeof(struct fg_card), sizeof(struct fg_process),
				  sizeof(struct fg_seat),  sizeof(struct fg_work), FG_STATE_VERSION};

	return fg_hash(sizes, sizeof sizes);
}

char *fg_read_file(const char *path, size_t *length, struct stat *info)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	char *text = NULL;
	size_t have = 0;

	if (fd < 0)
		return NULL;
	if (fstat(fd, info) == 0 && info->st_size >= 0 && info->st_size <= MAX_CONFIG_BYTES &&
	    (text = malloc((size_t)info->st_size + 1)) != NULL) {
		while (have < (size_t)info->st_size) {
			ssize_t got = read(fd, text + have, (size_t)info->st_size - have);

			if (got < 0 && errno == EINTR)
				continue;
			if (got <= 0)
				break;
			have += (size_t)got;
		}
		text[have] = '\0';
		*length = have;
	}
	close(fd);
	return text;
}

/* Zeroes the file without making it smaller. */
static int clear_file(int fd, uint64_t size)
{
	struct stat info;

	if (fstat(fd, &info) != 0)
		return -1;
	if (info.st_size > 0 && fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0,
					  (off_t)round_page((uint64_t)info.st_size)) != 0) {
		/* A file system without holes: write zeros over what may have been used. */
		static const char zeros[65536];

		for (off_t at = 0; at < info.st_size; at += (off_t)sizeof zeros) {
			size_t part = info.st_size - at < (off_t)sizeof zeros ? (size_t)(info.st_size - at)
									      : sizeof zeros;

			if (pwrite(fd, zeros, part, at) != (ssize_t)part)
				return -1;
		}
	}
	if ((uint64_t)info.st_size < size && ftruncate(fd, (off_t)size) != 0)
		return -1;
	return 0;
}

static void fill_card(struct fg_card *card, const struct fg_card_config *config)
{
	card->config = *config;
	card->compute_mode = config->compute_mode;
	card->persistence = config->persistence;
	card->ecc_enabled = card->ecc_pending = config->ecc_enabled;
	card->mig_enabled = card->mig_pending = config->mig_enabled;
}

static void fill(const struct fg_config *config, const struct stat *file, uint64_t hash)
{
	struct fg_state *state = fg_state;
	struct stat self;
	struct timespec now;

	clock_gettime(CLOCK_REALTIME, &now);
	state->version = FG_STATE_VERSION;
	state->build = fg_state_build();
	state->boot = ((uint64_t)now.tv_sec << 30) ^ (uint64_t)now.tv_nsec ^ ((uint64_t)getpid() << 40);
	state->process_offset = round_page(sizeof *state);
	state->seat_offset = round_page(state->process_offset + FG_MAX_PROCESSES * sizeof(struct fg_process));
	state->queue_offset = round_page(state->seat_offset + FG_MAX_SEATS * sizeof(struct fg_seat));
	state->card_offset = round_page(state->queue_offset +
					(uint64_t)FG_MAX_SEATS * FG_QUEUE_ENTRIES * sizeof(struct fg_work));
	state->size = round_page(state->card_offset + config->card_count * sizeof(struct fg_card));
	state->card_count = config->card_count;
	state->config_inode = file->st_ino;
	state->config_size = (uint64_t)file->st_size;
	state->config_time_ns =
	    (uint64_t)file->st_mtim.tv_sec * 1000000000u + (uint64_t)file->st_mtim.tv_nsec;
	state->config_hash = hash;
	state->creator_pid_namespace = stat("/proc/self/ns/pid", &self) == 0 ? self.st_ino : 0;
	state->driver = config->driver;
	state->launch_ns = config->driver.launch_ns;
	state->control[0].launch_ns = FG_CONTROL_UNSET;
	for (uint32_t i = 0; i < config->card_count; i++) {
		fill_card(fg_card_at(i), &config->card[i]);
		fg_account_layout(i);
	}
}

static uint64_t size_for(uint32_t cards)
{
	return round_page(sizeof(struct fg_state)) + FG_MAX_PROCESSES * sizeof(struct fg_process) +
	       FG_MAX_SEATS * sizeof(struct fg_seat) +
	       (uint64_t)FG_MAX_SEATS * FG_QUEUE_ENTRIES * sizeof(struct fg_work) +
	       cards * sizeof(struct fg_card) + 5 * 4096u;
}

/* The same text under another time stamp or inode: the state goes on. */
static int is_same_text(int fd, uint64_t hash, const struct stat *file)
{
	struct stat info;

	if (fstat(fd, &info) != 0 || (uint64_t)info.st_size < sizeof *fg_state ||
	    fg_state->magic != FG_STATE_MAGIC || fg_state->version != FG_STATE_VERSION ||
	    fg_state->build != fg_state_build() || fg_state->config_hash != hash)
		return 0;
	fg_state->config_inode = file->st_ino;
	fg_state->config_size = (uint64_t)file->st_size;
	fg_state->config_time_ns =
	    (uint64_t)file->st_mtim.tv_sec * 1000000000u + (uint64_t)file->st_mtim.tv_nsec;
	return 1;
}

enum fg_open_result fg_state_make(int fd, const char *config_path)
{
	char error[400] = "";
	struct fg_config config;
	struct stat file;
	size_t length = 0;
	char *text = fg_read_file(config_path, &length, &file);
	uint64_t hash;

	if (text == NULL) {
		fg_state_complain(config_path, "cannot be read");
		return FG_OPEN_BAD_CONFIG;
	}
	hash = fg_hash(text, length);
	if (is_same_text(fd, hash, &file)) {
		free(text);
		return FG_OPEN_OK;
	}
	int bad = fg_config_parse(text, length, &config, error, sizeof error);

	free(text);
	if (bad) {
		fg_state_complain(config_path, error);
		return FG_OPEN_BAD_CONFIG;
	}
	if (fg_process_any_lives(fd)) {
		fg_state_complain(config_path,
				  "was changed while programs still use the cards it named before; end them");
		fg_config_free(&config);
		return FG_OPEN_MISMATCH;
	}
	if (clear_file(fd, size_for(config.card_count)) != 0) {
		fg_state_complain(config_path, "no room for the state beside it");
		fg_config_free(&config);
		return FG_OPEN_NO_ACCESS;
	}
	fill(&config, &file, hash);
	fg_config_free(&config);
	__atomic_store_n(&fg_state->magic, FG_STATE_MAGIC, __ATOMIC_RELEASE);
	return FG_OPEN_OK;
}
