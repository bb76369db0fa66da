// SPDX-License-Identifier: Apache-2.0

// Command cdi-check answers questions about CDI with the reference library, the one inside the runtimes.
//
// It reads one JSON request per line on standard input and writes one JSON answer per line on standard output,
// in order, so that a test asks hundreds of things with one process. It decides nothing itself: every answer is
// what the library says. A panic of the library is an answer too ("panic: …"), because a runtime would have died.
package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	oci "github.com/opencontainers/runtime-spec/specs-go"
	"tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/pkg/parser"
	specs "tags.cncf.io/container-device-interface/specs-go"
)

type request struct {
	Op          string            `json:"op"`
	Path        string            `json:"path"`
	Dirs        []string          `json:"dirs"`
	Devices     []string          `json:"devices"`
	Name        string            `json:"name"`
	Plugin      string            `json:"plugin"`
	DeviceID    string            `json:"deviceID"`
	Annotations map[string]string `json:"annotations"`
	Spec        *specs.Spec       `json:"spec"`
	OCI         *oci.Spec         `json:"oci"`
}

// answer holds what any operation has to say; each fills its part. An empty Error means that the library agreed.
type answer struct {
	Error       string              `json:"error"`
	Errors      map[string][]string `json:"errors,omitempty"`
	Vendor      string              `json:"vendor,omitempty"`
	Class       string              `json:"class,omitempty"`
	Device      string              `json:"device,omitempty"`
	Devices     []string            `json:"devices,omitempty"`
	Keys        []string            `json:"keys,omitempty"`
	Key         string              `json:"key,omitempty"`
	Annotations map[string]string   `json:"annotations,omitempty"`
	Version     string              `json:"version,omitempty"`
	Unresolved  []string            `json:"unresolved,omitempty"`
	Spec        *specs.Spec         `json:"spec,omitempty"`
	OCI         *oci.Spec           `json:"oci,omitempty"`
}

var operations = map[string]func(*request, *answer) error{
	"file":             loadFile,
	"dirs":             loadDirs,
	"inject":           inject,
	"live":             live,
	"qualified":        qualified,
	"annotationKey":    annotationKey,
	"annotationUpdate": annotationUpdate,
	"annotationParse":  annotationParse,
	"minimumVersion":   minimumVersion,
	"fileName":         fileName,
}

func loadFile(q *request, a *answer) error {
	spec, err := cdi.ReadSpec(q.Path, 0)
	if err != nil {
		return err
	}
	a.Spec = spec.Spec
	a.Version = spec.Version
	return nil
}

func cacheOf(q *request, a *answer) (*cdi.Cache, error) {
	cache, err := cdi.NewCache(cdi.WithSpecDirs(q.Dirs...), cdi.WithAutoRefresh(false))
	if err != nil {
		return nil, err
	}
	if err := cache.Refresh(); err != nil {
		a.Errors = map[string][]string{}
		for path, found := range cache.GetErrors() {
			for _, e := range found {
				a.Errors[path] = append(a.Errors[path], e.Error())
			}
		}
	}
	return cache, nil
}

// running holds one cache per list of directories, kept as a runtime keeps it: for as long as this program runs.
var running = map[string]*cdi.Cache{}

// live lists the devices that a running runtime knows of now, without being told to look.
func live(q *request, a *answer) (err error) {
	key := strings.Join(q.Dirs, "\x00")
	cache, known := running[key]
	if !known {
		if cache, err = cdi.NewCache(cdi.WithSpecDirs(q.Dirs...), cdi.WithAutoRefresh(true)); err != nil {
			return err
		}
		running[key] = cache
	}
	a.Devices = cache.ListDevices()
	return nil
}

func loadDirs(q *request, a *answer) error {
	cache, err := cacheOf(q, a)
	if err != nil {
		return err
	}
	a.Devices = cache.ListDevices()
	return nil
}

func inject(q *request, a *answer) error {
	cache, err := cacheOf(q, a)
	if err != nil {
		return err
	}
	a.Unresolved, err = cache.InjectDevices(q.OCI, q.Devices...)
	a.OCI = q.OCI
	return err
}

func qualified(q *request, a *answer) (err error) {
	a.Vendor, a.Class, a.Device, err = parser.ParseQualifiedName(q.Name)
	return err
}

func annotationKey(q *request, a *answer) (err error) {
	a.Key, err = cdi.AnnotationKey(q.Plugin, q.DeviceID)
	return err
}

func annotationUpdate(q *request, a *answer) (err error) {
	a.Annotations, err = cdi.UpdateAnnotations(q.Annotations, q.Plugin, q.DeviceID, q.Devices)
	return err
}

func annotationParse(q *request, a *answer) (err error) {
	a.Keys, a.Devices, err = cdi.ParseAnnotations(q.Annotations)
	return err
}

func minimumVersion(q *request, a *answer) (err error) {
	if q.Spec == nil {
		return errors.New("no spec given")
	}
	a.Version, err = specs.MinimumRequiredVersion(q.Spec)
	return err
}

func fileName(q *request, a *answer) (err error) {
	if q.Spec == nil {
		return errors.New("no spec given")
	}
	a.Key, err = cdi.GenerateNameForTransientSpec(q.Spec, q.Name)
	return err
}

func serve(line []byte) (a answer) {
	defer func() {
		if p := recover(); p != nil {
			a = answer{Error: fmt.Sprintf("panic: %v", p)}
		}
	}()
	var q request
	if err := json.Unmarshal(line, &q); err != nil {
		a.Error = "request: " + err.Error()
		return a
	}
	operation, known := operations[q.Op]
	if !known {
		a.Error = fmt.Sprintf("request: unknown op %q", q.Op)
		return a
	}
	if err := operation(&q, &a); err != nil {
		a.Error = err.Error()
		if a.Error == "" {
			a.Error = "error without a text"
		}
	}
	return a
}

func run(in io.Reader, out io.Writer) error {
	lines := bufio.NewScanner(in)
	lines.Buffer(nil, 64<<20)
	writer := bufio.NewWriter(out)
	answers := json.NewEncoder(writer)
	answers.SetEscapeHTML(false)
	for lines.Scan() {
		if err := answers.Encode(serve(lines.Bytes())); err != nil {
			return err
		}
		if err := writer.Flush(); err != nil {
			return err
		}
	}
	return lines.Err()
}

func main() {
	if err := run(os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "cdi-check:", err)
		os.Exit(1)
	}
}
