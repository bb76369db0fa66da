/* SPDX-License-Identifier: Apache-2.0
 *
 * See maps.h. The file is read in pieces, line by line, into the stack: it may be long.
 */
#include "maps.h"

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "files.h"

struct walk {
	uintptr_t address; /* looked for, or 0 */
	struct aq_mapped_file *file;
	bool found;
	bool program; /* a file of any kind is mapped */
};

/* A line is "start-end perms offset device inode path". */
static void look_at(struct walk *walk, const char *line)
{
	char *end;
	uintptr_t start = strtoull(line, &end, 16);
	uintptr_t past = *end == '-' ? strtoull(end + 1, &end, 16) : 0;
	const char *field = *end == ' ' ? strchr(end + 1, ' ') : NULL; /* behind the permissions */
	field = field ? strchr(field + 1, ' ') : NULL; /* behind the offset */
	if (field == NULL)
		return;
	field++;
	const char *inode = strchr(field, ' ');
	if (inode == NULL)
		return;
	size_t length = (size_t)(inode - field) + 1;
	while (field[length] >= '0' && field[length] <= '9')
		length++;
	if (inode[1] != '0')
		walk->program = true;
	if (length >= sizeof(walk->file->text))
		return;
	if (walk->address) {
		if (walk->address < start || walk->address >= past)
			return;
		memcpy(walk->file->text, field, length);
		walk->file->text[length] = '\0';
		walk->found = true;
	} else if (strncmp(walk->file->text, field, length) == 0 && walk->file->text[length] == '\0') {
		walk->found = true;
	}
}

/* Hands the lines of maps to look_at. False: it could not be read to its end. */
static bool read_lines(const char *pid, struct walk *walk)
{
	char path[64], buffer[2048];
	size_t filled = 0;
	ssize_t got = -1;
	if (!aq_path(path, sizeof(path), "/proc", pid, "maps"))
		return false;
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	while (fd >= 0 && !walk->found) {
		got = read(fd, buffer + filled, sizeof(buffer) - 1 - filled);
		if (got < 0 && errno == EINTR)
			continue;
		if (got <= 0)
			break;
		filled += (size_t)got;
		buffer[filled] = '\0';
		char *line = buffer;
		for (char *next; !walk->found && (next = strchr(line, '\n')) != NULL; line = next + 1) {
			*next = '\0';
			look_at(walk, line);
		}
		filled -= (size_t)(line - buffer);
		/* A path may be longer than the buffer; what counts stands at the beginning of its line. */
		if (filled == sizeof(buffer) - 1) {
			look_at(walk, line);
			filled = 0;
		}
		memmove(buffer, line, filled);
	}
	if (fd >= 0)
		close(fd);
	return walk->found || got == 0;
}

/* Which file lies at the address. */
static void look_up_own(struct aq_mapped_file *file)
{
	struct walk walk = {(uintptr_t)file->address, file, false, false};
	if (!read_lines("self", &walk) || !walk.found)
		file->text[0] = '\0';
}

bool aq_maps_lack(const char *pid, struct aq_mapped_file *file)
{
	int saved = errno;
	if (file->text[0] == '\0')
		look_up_own(file);
	struct walk walk = {0, file, false, false};
	bool whole = file->text[0] != '\0' && read_lines(pid, &walk);
	errno = saved;
	/* With nothing of a file mapped it is on its way out or in between two programs, and what it held may
	 * not be back with the driver yet. */
	return whole && walk.program && !walk.found;
}
