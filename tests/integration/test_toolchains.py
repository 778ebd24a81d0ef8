"""Evaluators in the languages that people write them in: the sandbox leaves them what they need."""

from __future__ import annotations

import shutil

from twisted.trial.unittest import SkipTest

from tests.integration.client import text
from tests.integration.harness import DaemonTestCase

# Each program uses threads, a child, a pipe, a timer, and a file that it makes, and prints `42`.
C = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
static void *half(void *answer) { return (*(int *)answer += 21), answer; }
int main(void) {
    int answer = 0, pair[2], status;
    pthread_t thread;
    pthread_create(&thread, NULL, half, &answer);
    pthread_join(thread, NULL);
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair)) return 1;
    if (!fork()) return write(pair[1], "x", 1) != 1;
    char letter;
    if (read(pair[0], &letter, 1) != 1 || wait(&status) < 0 || status) return 2;
    int file = open("file", O_RDWR | O_CREAT, 0600);
    if (posix_fallocate(file, 0, 65536) || lseek(file, 0, SEEK_END) != 65536) return 3;
    int *place = mmap(NULL, 65536, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    *place = 21;
    sync();
    timer_t timer;
    struct sigevent event = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGUSR1};
    if (timer_create(CLOCK_MONOTONIC, &event, &timer)) return 4;
    answer += *place;
    FILE *child = popen("cat", "w");
    fprintf(child, "%d\n", answer);
    return pclose(child);
}
"""


PYTHON = r"""
import asyncio, concurrent.futures, multiprocessing, os, signal, sqlite3, subprocess, tempfile
def double(number):
    return 2 * number
async def child():
    made = await asyncio.create_subprocess_exec("cat", stdin=-1, stdout=-1)
    return int((await made.communicate(b"1\n"))[0])
if __name__ == "__main__":
    with multiprocessing.Pool(2) as pool:
        found = pool.map(double, [1, 2, 3])
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=queue.put, args=(4,))
    process.start()
    found.append(queue.get())
    process.join()
    with concurrent.futures.ProcessPoolExecutor(2) as executor:
        found += executor.map(double, [5])
    with multiprocessing.Manager() as manager:
        found.append(manager.list([9])[0])
    found.append(asyncio.run(child()))
    with sqlite3.connect("database") as database:
        database.execute("create table answers (answer)")
        database.execute("insert into answers values (6)")
        found += database.execute("select answer from answers").fetchone()
    with tempfile.NamedTemporaryFile() as file:
        os.posix_fallocate(file.fileno(), 0, 4096)
    print(sum(found))
"""


NODE = r"""
const { Worker, isMainThread, parentPort } = require("worker_threads");
const { execFile, fork } = require("child_process");
const fs = require("fs");
if (!isMainThread) parentPort.postMessage(10);
else if (process.send) process.send(11);
else {
  const worker = new Promise((done) => new Worker(__filename).on("message", done));
  const child = new Promise((done) => fork(__filename).on("message", done));
  const echo = new Promise((done) => execFile("echo", ["1"], (_, out) => done(Number(out))));
  const file = fs.promises.writeFile("file", "20").then(() => Number(fs.readFileSync("file")));
  Promise.all([worker, child, echo, file]).then((all) => console.log(all.reduce((a, b) => a + b)));
}
"""

GO = r"""
package main
import ("fmt"; "os"; "os/exec"; "sync"; "time")
func main() {
    var group sync.WaitGroup
    answers := make(chan int, 20)
    for i := 0; i < 20; i++ {
        group.Add(1)
        go func() { time.Sleep(time.Millisecond); answers <- 2; group.Done() }()
    }
    group.Wait()
    said, failure := exec.Command("echo", "2").Output()
    if failure != nil { panic(failure) }
    if failure := os.WriteFile("file", said, 0600); failure != nil { panic(failure) }
    var answer int
    fmt.Sscan(string(said), &answer)
    for len(answers) > 0 { answer += <-answers }
    fmt.Println(answer)
}
"""

RUST = r"""
use std::{fs, process::Command, sync::mpsc, thread};
fn main() {
    let (tell, told) = mpsc::channel();
    for _ in 0..20 { let tell = tell.clone(); thread::spawn(move || tell.send(2).unwrap()); }
    drop(tell);
    let said = Command::new("echo").arg("2").output().unwrap().stdout;
    fs::write("file", &said).unwrap();
    let first: i32 = String::from_utf8(said).unwrap().trim().parse().unwrap();
    println!("{}", first + told.iter().sum::<i32>());
}
"""


class ToolchainTests(DaemonTestCase):
    async def check(self, name: str, source: str, command: str) -> None:
        program = command.split()[0]
        if shutil.which(program, path="/usr/bin:/bin") is None:
            raise SkipTest(f"there is no {program} in /usr/bin")
        self.repository.write(name, source)
        self.commit = self.repository.commit()
        events = await self.run_command(command)
        self.assertEqual(text(events), "42\n", events)

    async def test_c_runs_in_the_sandbox(self) -> None:
        await self.check("main.c", C, "gcc -O1 -pthread -o main main.c && ./main")

    async def test_python_runs_in_the_sandbox(self) -> None:
        await self.check("main.py", PYTHON, "python3 main.py")

    async def test_node_runs_in_the_sandbox(self) -> None:
        await self.check("main.js", NODE, "node main.js")

    async def test_go_runs_in_the_sandbox(self) -> None:
        await self.check("main.go", GO, "go build -p 1 -o main main.go && ./main")

    async def test_rust_runs_in_the_sandbox(self) -> None:
        await self.check("main.rs", RUST, "rustc -O main.rs && ./main")
