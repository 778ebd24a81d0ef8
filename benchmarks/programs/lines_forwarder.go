// Baseline: a forwarder in Go, from the stdout of a process to JSON Lines in an HTTP answer.
//
// `lines_forwarder COMMAND` runs the shell command once for each request, and prints the port on
// which it listens. As from the daemon there is an event for each line, and one for its terminator.
// All whole lines are sent before the program waits for more.
package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"os/exec"
)

const bufferSize = 64 * 1024

type event struct {
	Type    string `json:"type"`
	Payload string `json:"payload"`
}

func main() {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(listener.Addr().(*net.TCPAddr).Port)
	log.Fatal(http.Serve(listener, http.HandlerFunc(handle)))
}

func handle(response http.ResponseWriter, request *http.Request) {
	command := exec.CommandContext(request.Context(), "/bin/sh", "-c", os.Args[1])
	stdout, err := command.StdoutPipe()
	if err == nil {
		err = command.Start()
	}
	if err != nil {
		http.Error(response, err.Error(), http.StatusInternalServerError)
		return
	}
	response.Header().Set("Content-Type", "application/jsonl")
	if err := forward(stdout, response); err != nil {
		log.Print(err)
	}
	if err := command.Wait(); err != nil {
		log.Print(err)
	}
}

func forward(stdout io.Reader, response http.ResponseWriter) error {
	lines := bufio.NewReaderSize(stdout, bufferSize)
	answer := bufio.NewWriterSize(response, bufferSize)
	encoder := json.NewEncoder(answer)
	encoder.SetEscapeHTML(false)
	for {
		line, err := lines.ReadBytes('\n')
		text := bytes.TrimSuffix(line, []byte("\n"))
		if len(text) > 0 {
			if err := encoder.Encode(event{"text", string(text)}); err != nil {
				return err
			}
		}
		if len(text) < len(line) {
			if err := encoder.Encode(event{"text", "\n"}); err != nil {
				return err
			}
		}
		if errors.Is(err, io.EOF) {
			return answer.Flush()
		}
		if err != nil {
			return err
		}
		if rest, _ := lines.Peek(lines.Buffered()); bytes.IndexByte(rest, '\n') < 0 {
			if err := answer.Flush(); err != nil {
				return err
			}
			response.(http.Flusher).Flush()
		}
	}
}
