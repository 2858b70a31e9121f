//! The command-line program, as it is built.
#![cfg(feature = "cli")]

use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Output};

use flate2::Compression;
use flate2::write::GzEncoder;

fn program(arguments: &[&str]) -> (i32, String, String) {
    let Output {
        status,
        stdout,
        stderr,
    } = Command::new(env!("CARGO_BIN_EXE_memory-compiler"))
        .args(arguments)
        .output()
        .unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (status.code().unwrap(), text(stdout), text(stderr))
}

fn flux() -> String {
    format!("{}/tests/data/flux.trace.gz", env!("CARGO_MANIFEST_DIR"))
}

/// A file of this test's own.
fn file(name: &str, content: &[u8]) -> String {
    let path: PathBuf = [env!("CARGO_TARGET_TMPDIR"), name].iter().collect();
    std::fs::write(&path, content).unwrap();
    path.to_str().unwrap().to_owned()
}

const INTERLEAVED: &str =
    "id,lower,upper,size\nb1,0,3,4096\nb2,3,9,4096\nb3,0,9,4096\nb4,9,21,4096\nb5,0,21,4096\n";

#[test]
fn plan_prints_what_flux_holds() {
    let (code, out, err) = program(&["plan", &flux(), "--time-limit", "2s"]);
    assert_eq!((code, err.as_str()), (0, ""));
    let row = out.lines().nth(1).unwrap();
    // L, the floor and what is held can be told apart.
    for part in ["7189", "2459.27 MiB", "2460.00 MiB", "best fit by size"] {
        assert!(row.contains(part), "{row}");
    }
}

#[test]
fn plan_prints_one_json_object_a_file() {
    let csv = file("json.csv", INTERLEAVED.as_bytes());
    let (code, out, _) = program(&["plan", "--json", "--granule", "4KiB", &flux(), &csv]);
    assert_eq!(code, 0);
    let objects: Vec<serde_json::Value> = out
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(objects.len(), 2);
    assert_eq!(objects[1]["file"], csv.as_str());
    assert_eq!(objects[1]["buffers"], 5);
    assert_eq!(objects[1]["live_peak_bytes"], 3 * 4096);
    assert_eq!(objects[1]["floor_bytes"], 3 * 4096);
    assert_eq!(objects[1]["held_bytes"], 3 * 4096);
    assert!(objects[0]["strategy"].is_string() && objects[0]["seconds"].is_f64());
}

#[test]
fn a_plan_that_was_written_validates_and_a_spoilt_one_does_not() {
    let csv = file("round.csv", INTERLEAVED.as_bytes());
    let out = file("round.plan.csv", b"");
    assert_eq!(
        program(&["plan", &csv, "--granule", "4KiB", "--out", &out]).0,
        0
    );
    let (code, text, _) = program(&["validate", &csv, &out, "--granule", "4KiB"]);
    assert_eq!(code, 0, "{text}");
    assert!(
        text.contains("sound plan") && text.contains("held 12.00 KiB"),
        "{text}"
    );
    let plan = std::fs::read_to_string(&out).unwrap();
    let spoilt: String = plan
        .lines()
        .map(|line| match line.split_once(",4096,") {
            Some((start, _)) => format!("{start},4096,0\n"),
            None => format!("{line}\n"),
        })
        .collect();
    let spoilt = file("spoilt.plan.csv", spoilt.as_bytes());
    let (code, _, err) = program(&["validate", &csv, &spoilt, "--granule", "4KiB"]);
    assert_eq!(code, 1);
    assert!(
        err.ends_with("buffers b1 and b3 are live together and share byte 0 of frame 0\n"),
        "{err}"
    );
}

#[test]
fn an_aliasing_plan_validates_from_its_file() {
    // At this granule the checker has to follow the frames column.
    let mut csv = String::from("id,lower,upper,size\n");
    for i in 0..200_u64 {
        let begin = i * 37 % 101;
        csv += &format!(
            "{i},{begin},{},{}\n",
            begin + 5 + i * 11 % 60,
            512 * (1 + i * 7 % 23)
        );
    }
    let csv = file("aliasing.csv", csv.as_bytes());
    let out = file("aliasing.plan.csv", b"");
    let (code, text, _) = program(&["plan", &csv, "--granule", "512", "--out", &out]);
    assert!(code == 0 && text.contains("page aliasing"), "{text}");
    let (code, text, err) = program(&["validate", &out, "--granule", "512"]);
    assert_eq!(code, 0, "{err}");
    assert!(text.contains("sound plan"), "{text}");
}

#[test]
fn damaged_input_is_one_line_with_file_line_and_reason_and_exit_code_2() {
    let mut gz = GzEncoder::new(Vec::new(), Compression::default());
    gz.write_all("a 0 512\nf 0\n".repeat(10_000).as_bytes())
        .unwrap();
    let gz = gz.finish().unwrap();
    for (name, content, line, reason) in [
        (
            "damaged.trace",
            &b"a 0 8\nf 1\n"[..],
            "line 2",
            "buffer 1 is freed while it is not live",
        ),
        (
            "damaged.csv",
            b"id,lower,upper,size\n0,1,x,8\n",
            "line 2",
            "upper is not a number: \"x\"",
        ),
        (
            "header.csv",
            b"id,lower,upper\n",
            "line 1",
            "column \"size\" is missing",
        ),
        (
            "cut.trace.gz",
            &gz[..gz.len() / 2],
            "line ",
            "deflate stream",
        ),
        ("text.trace", b"a 0 8\n\xff\xfe\n", "line 2", "UTF-8"),
    ] {
        let path = file(name, content);
        for command in ["plan", "validate", "replay"] {
            let (code, _, err) = program(&[command, &path]);
            if command == "replay" && name.ends_with("csv") {
                assert!(code == 2 && err.contains("a trace is needed"), "{err}");
                continue;
            }
            assert_eq!(
                (code, err.lines().count()),
                (2, 1),
                "{command} {name}: {err}"
            );
            assert!(
                err.contains(&path) && err.contains(line) && err.contains(reason),
                "{err}"
            );
        }
    }
    let (code, _, err) = program(&["plan", "no/such/file"]);
    assert!(code == 2 && err.starts_with("no/such/file: "), "{err}");
}

#[test]
fn replay_prints_the_statistics_table() {
    let (code, out, err) = program(&["replay", &flux(), "--device", "host", "--steps", "4"]);
    assert_eq!(code, 0, "{err}");
    let row = out.lines().find(|line| line.starts_with("step ")).unwrap();
    assert!(row.contains("14378"), "{row}");
    assert!(out.contains("last step: 0 breaks, 0 driver calls"), "{out}");
    assert!(out.contains("compiled by"), "{out}");
}

#[test]
fn replay_writes_the_page_that_shows_where_the_memory_goes() {
    let folder =
        std::env::temp_dir().join(format!("memory-compiler-report-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let page = folder.join("flux.html");
    let (code, _, err) = program(&["replay", &flux(), "--report", page.to_str().unwrap()]);
    assert_eq!(code, 0, "{err}");
    let text = std::fs::read_to_string(&page).unwrap();
    assert!(text.contains("At the peak, the largest buffers"));
    let missing = folder.join("missing/flux.html");
    let (code, _, err) = program(&["replay", &flux(), "--report", missing.to_str().unwrap()]);
    assert_eq!(code, 1);
    assert!(err.contains("missing/flux.html"), "{err}");
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn replay_holds_the_floor_once_it_has_compiled() {
    let statistics = |steps: &str| {
        let trace = format!("{}/tests/data/sd15.trace.gz", env!("CARGO_MANIFEST_DIR"));
        let (code, out, err) = program(&["replay", &trace, "--steps", steps]);
        assert_eq!(code, 0, "{err}");
        out.lines().nth(2).unwrap().to_owned()
    };
    assert!(statistics("3").contains("floor 2.12 GiB, held 2.13 GiB"));
    assert!(statistics("4").contains("floor 2.12 GiB, held 2.12 GiB"));
}

#[test]
fn a_granule_that_cannot_be_is_refused_alike_by_every_command() {
    for (command, granule, reason) in [
        ("plan", "1536", "1.50 KiB is no power of two from 512 B to"),
        (
            "validate",
            "1536",
            "1.50 KiB is no power of two from 512 B to",
        ),
        (
            "replay",
            "1536",
            "1.50 KiB is no power of two from 4.00 KiB to",
        ),
        ("plan", "1000", "1000 B is no power of two from 512 B to"),
        ("plan", "0", "0 B is no power of two from 512 B to"),
        (
            "plan",
            "64MiB",
            "64.00 MiB is no power of two from 512 B to",
        ),
        ("replay", "512", "512 B is no power of two from 4.00 KiB to"),
    ] {
        let (code, out, err) = program(&[command, &flux(), "--granule", granule]);
        assert_eq!(
            err,
            format!("option granule: {reason} 32.00 MiB\n"),
            "{command}"
        );
        assert_eq!((code, out.as_str()), (2, ""), "{command}");
    }
}

#[test]
fn replay_takes_the_address_space_that_its_refusal_asks_for() {
    let trace = file("large.trace", b"a 0 268435456\nf 0\n");
    let (code, _, err) = program(&["replay", &trace, "--address-space", "64MiB"]);
    assert_eq!(code, 1);
    assert!(
        err.contains("address space of 64.00 MiB is used up: asked for 256.00 MiB")
            && err.contains("raise --address-space"),
        "{err}"
    );
    let (code, _, err) = program(&["replay", &trace, "--address-space", "1TiB"]);
    assert_eq!((code, err.as_str()), (0, ""));
    let (code, _, err) = program(&["replay", &trace, "--address-space", "4096"]);
    assert!(code == 2 && err.contains("option address_space"), "{err}");
}

#[cfg(not(feature = "cuda"))]
#[test]
fn a_build_without_a_gpu_says_how_to_get_one() {
    let (code, _, err) = program(&["replay", &flux(), "--device", "cuda"]);
    assert!(code == 1 && err.contains("--features cli,cuda"), "{err}");
}

#[test]
fn a_trace_with_survivors_replays() {
    let trace = file("survivor.trace", b"s down\na 0 8388608\na 1 4096\nf 0\ne\n");
    let (code, out, err) = program(&["replay", &trace, "--steps", "6"]);
    assert_eq!(code, 0, "{err}");
    assert!(out.contains("last step: 0 breaks, 0 driver calls"), "{out}");
}

#[test]
fn wrong_options_are_refused_and_help_names_the_commands() {
    for arguments in [
        &["plan"][..],
        &["plan", "x", "--granule", "1000"],
        &["plan", "x", "--time-limit", "5"],
        &["replay", "x", "--steps", "0"],
        &["plan", "x", "y", "--out", "z"],
    ] {
        assert_eq!(program(arguments).0, 2, "{arguments:?}");
    }
    let (code, out, _) = program(&["--help"]);
    assert_eq!(code, 0);
    for command in ["plan", "validate", "replay"] {
        assert!(out.contains(command), "{out}");
    }
}
