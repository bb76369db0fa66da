/* SPDX-License-Identifier: Apache-2.0
 *
 * What the fake driver's libraries show to the world.
 *
 * Everything is compiled with -fvisibility=hidden; a function of the driver's API is marked FAKE_EXPORT (or
 * declared under the visibility push of the API header). fakegpu/gen finds by nm which API names the objects
 * define and writes a stub for every other name of the headers; a version script for each flavour then hides
 * what a driver of that age did not have. Invariant: a library exports exactly the list of its flavour, and
 * nothing of ours.
 */
#ifndef FAKEGPU_EXPORT_H
#define FAKEGPU_EXPORT_H

#define FAKE_EXPORT __attribute__((visibility("default")))

/* Which driver this library is; one object per flavour, written by fakegpu/gen. */
struct fake_flavour {
	const char *name; /* "580", "550", "525", "470" */
	const char *driver_version; /* "580.65.06": also the suffix of the file names */
	int cuda_version; /* 13000, 12040, 12000, 11040: entry points younger than this do not exist */
	int nvml_version_major; /* 13, 12, 12, 11 */
	int hides_names; /* 0: the full one, whose versions the configuration may say */
};
extern const struct fake_flavour fake_flavour;

/* Called by every generated stub: logs the call, applies configured faults, answers "not supported". */
int fake_stub_cuda(const char *name);
int fake_stub_nvml(const char *name);

#endif
