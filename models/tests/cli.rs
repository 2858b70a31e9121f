//! The `diffuse` program as a person meets it.

use std::{
    path::Path,
    process::{Command, Output, Stdio},
};

fn diffuse(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_diffuse"))
        .args(arguments)
        .output()
        .expect("the program starts")
}

/// Exit code 2, one line on stderr, nothing on stdout, no panic.
fn assert_refused(arguments: &[&str], reason: &str) {
    let output = diffuse(arguments);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{arguments:?}: {stderr}");
    assert_eq!(stderr.lines().count(), 1, "{arguments:?}: {stderr}");
    assert!(stderr.starts_with("error: "), "{arguments:?}: {stderr}");
    assert!(stderr.contains(reason), "{arguments:?}: {stderr}");
    assert!(!stderr.contains("panicked"), "{arguments:?}: {stderr}");
    assert!(output.stdout.is_empty(), "{arguments:?}");
}

fn text(path: &Path) -> &str {
    path.to_str().expect("a temporary path is UTF-8")
}

#[test]
fn bad_arguments_are_refused_in_one_line() {
    assert_refused(&["--model", "gan"], "gan");
    assert_refused(&["--class", "11"], "0 to 9 or all");
    assert_refused(&["--class", "seven"], "0 to 9 or all");
    assert_refused(&["--steps", "0"], "steps must be at least 1");
    let whole = "invalid value '-3' for '--steps <STEPS>': expected a whole number";
    assert_refused(&["--steps", "-3"], whole);
    assert_refused(&["--samples", "-1"], "expected a whole number");
    assert_refused(&["--seed", "-1"], "expected a whole number");
    assert_refused(&["--class", "-1"], "0 to 9 or all");
    assert_refused(&["--cfg", "-1"], "guidance scale");
    assert_refused(&["--samples", "0"], "samples must be at least 1");
    assert_refused(&["--steps", "18446744073709551615"], "at most 1000000");
    assert_refused(&["--samples", "18446744073709551615"], "at most 200: ");
    assert_refused(&["--samples", "1000000", "--steps", "1"], "another seed");
    let one_digit = ["--class", "3", "--samples", "2001"];
    assert_refused(&one_digit, "at most 2000: ");
    assert_refused(&["--sampler", "heun"], "heun");
    assert_refused(&["--cfg", "nan"], "guidance scale");
    assert_refused(&["--cfg-mode", "both"], "both");
    assert_refused(&["--cfg-until", "2"], "guided fraction");
    assert_refused(&["--granule", "2 parsecs"], "sizes look like");
    assert_refused(&["--colour"], "--colour");
    assert_refused(&["--step", "3"], "a similar argument exists: '--steps'");
    assert_refused(&["--step", "3"], "try '--help'");
    assert_refused(&["--model", "gan"], "[possible values: unet, dit]");
}

#[test]
fn bad_weights_are_refused_in_one_line() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let out = folder.path().join("sheet.png");
    let file = folder.path().join("w.safetensors");
    let with_weights = |reason: &str| {
        assert_refused(&["--weights", text(&file), "--out", text(&out)], reason);
        assert!(!out.exists(), "no sheet is left behind");
    };
    with_weights("cannot read");
    std::fs::write(&file, b"no weights").expect("a file is written");
    with_weights("not a safetensors file");
    let dit = memory_compiler_models::weights::embedded(memory_compiler_models::ModelKind::Dit);
    std::fs::write(&file, dit).expect("a file is written");
    with_weights("do not fit the model unet");
}

#[test]
fn an_output_that_cannot_be_written_is_refused_before_sampling() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let missing = folder.path().join("missing/sheet.png");
    // A million steps would take hours.
    let steps = ["--steps", "1000000", "--out"];
    assert_refused(&[&steps[..], &[text(&missing)]].concat(), "cannot write");
    assert_refused(
        &[&steps[..], &[text(folder.path())]].concat(),
        "cannot write",
    );
}

#[cfg(unix)]
#[test]
fn a_link_to_where_nothing_is_yet_is_checked_and_left_alone() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let link = folder.path().join("link.png");
    let check = |target: &str| {
        std::os::unix::fs::symlink(target, &link).expect("a link is made");
        let checked = memory_compiler_models::sheet::check_writable(&link);
        let names = std::fs::read_link(&link).expect("the link is still there");
        assert_eq!(names, Path::new(target));
        assert!(!link.exists(), "nothing was made under the link");
        std::fs::remove_file(&link).expect("the link goes");
        checked
    };
    check("sheet.png").expect("it can be written");
    check("missing/sheet.png").expect_err("there is no such folder");
    check(text(&folder.path().join("sheet.png"))).expect("it can be written");

    // A file behind a link keeps its content.
    let file = folder.path().join("sheet.png");
    std::fs::write(&file, b"content").expect("a file is written");
    std::os::unix::fs::symlink("sheet.png", &link).expect("a link is made");
    memory_compiler_models::sheet::check_writable(&link).expect("it can be written");
    assert_eq!(std::fs::read(&file).expect("it is still there"), b"content");
    assert!(link.is_symlink());
}

#[test]
fn the_same_seed_writes_the_same_sheet() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let draw = |name: &str, seed: &str| {
        let out = folder.path().join(name);
        let output = diffuse(&[
            "--model",
            "dit",
            "--steps",
            "3",
            "--class",
            "4",
            "--samples",
            "1",
            "--seed",
            seed,
            "--out",
            text(&out),
        ]);
        assert!(output.status.success(), "{output:?}");
        std::fs::read(out).expect("the sheet is there")
    };
    let first = draw("a.png", "1");
    assert!(first.starts_with(b"\x89PNG"));
    assert_eq!(first, draw("b.png", "1"));
    assert_ne!(first, draw("c.png", "2"));
}

#[test]
fn a_report_is_written_beside_the_sheet_or_where_it_is_asked_for() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (out, other) = (
        folder.path().join("sheet.png"),
        folder.path().join("other.html"),
    );
    let small = [
        "--model",
        "dit",
        "--steps",
        "4",
        "--class",
        "4",
        "--samples",
        "1",
        "--out",
        text(&out),
    ];
    let beside = out.with_extension("html");
    let draw = |more: &[&str]| {
        let output = diffuse(&[&small[..], more].concat());
        assert!(output.status.success(), "{output:?}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    assert!(!draw(&["--no-compile"]).contains("where the memory goes"));
    assert!(!beside.exists());
    assert!(draw(&[]).contains(text(&beside)));
    let page = std::fs::read_to_string(&beside).expect("the page is there");
    for scope in ["cond/block.0/attention", "uncond/block.0/attention"] {
        assert!(page.contains(scope), "{scope}");
    }
    std::fs::remove_file(&beside).expect("it goes");
    draw(&["--report", text(&other)]);
    assert!(other.exists() && !beside.exists());
    let missing = folder.path().join("missing/other.html");
    let output = diffuse(&[&small[..], &["--report", text(&missing)]].concat());
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    let output = diffuse(&[&small[..], &["--no-compile", "--report", text(&other)]].concat());
    assert_eq!(output.status.code(), Some(2), "{output:?}");
}

#[test]
fn memory_that_does_not_suffice_is_refused_in_one_line() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let out = folder.path().join("sheet.png");
    let with = |arguments: &[&str], reason: &str| {
        let output = [
            "--model",
            "dit",
            "--steps",
            "2",
            "--samples",
            "1",
            "--out",
            text(&out),
        ];
        let arguments = [&output[..], arguments].concat();
        let output = diffuse(&arguments);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {stderr}");
        let error = stderr.lines().last().unwrap_or_default();
        assert!(
            error.starts_with("error: ") && error.contains(reason),
            "{arguments:?}: {stderr}"
        );
        assert!(!stderr.contains("panicked"), "{arguments:?}: {stderr}");
        assert!(!out.exists(), "no sheet is left behind");
    };
    with(&["--budget", "512KiB"], "over the budget of 512.00 KiB");
    with(
        &["--budget", "4KiB"],
        "option budget: 4.00 KiB is less than one page",
    );
    let granule = "option granule: 3000 B is no power of two from 4.00 KiB to 32.00 MiB";
    with(&["--granule", "3000"], granule);
    with(
        &["--threshold", "100"],
        "option threshold: 100 B is below 4.00 KiB",
    );
    with(&["--threshold", "4095"], "4095 B is below 4.00 KiB");
    with(&["--no-compile", "--strict"], "cannot be used with");
}

#[test]
fn a_reader_that_went_away_is_no_failure() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let out = folder.path().join("sheet.png");
    let arguments = [
        "--model",
        "dit",
        "--steps",
        "2",
        "--class",
        "5",
        "--compare",
    ];
    let mut child = Command::new(env!("CARGO_BIN_EXE_diffuse"))
        .args([&arguments[..], &["--out", text(&out)]].concat())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program starts");
    drop((child.stdout.take(), child.stderr.take()));
    let status = child.wait().expect("the program ends");
    assert_eq!(status.code(), Some(0));
    assert!(out.exists() && out.with_extension("html").exists());
}

#[test]
fn without_a_terminal_it_says_once_a_run_what_it_draws() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let out = folder.path().join("sheet.png");
    let arguments = ["--model", "dit", "--steps", "1", "--class", "5"];
    let draw = |samples: &str| {
        let more = ["--samples", samples, "--out", text(&out)];
        let output = diffuse(&[&arguments[..], &more].concat());
        assert!(output.status.success(), "{output:?}");
        let text = |bytes| String::from_utf8(bytes).expect("UTF-8");
        (text(output.stdout), text(output.stderr))
    };
    let (stdout, stderr) = draw("1");
    assert_eq!(stderr, "drawing 1 image in 1 step on compiled memory …\n");
    assert!(stdout.starts_with("1 image in "), "{stdout}");
    let (stdout, stderr) = draw("2");
    assert_eq!(stderr, "drawing 2 images in 1 step on compiled memory …\n");
    assert!(stdout.starts_with("2 images in "), "{stdout}");
}

#[test]
fn compare_says_that_the_images_are_the_same_and_prints_the_table() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let out = folder.path().join("sheet.png");
    let output = diffuse(&[
        "--model",
        "dit",
        "--steps",
        "6",
        "--class",
        "7",
        "--samples",
        "1",
        "--strict",
        "--compare",
        "--out",
        text(&out),
    ]);
    assert!(output.status.success(), "{output:?}");
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert!(
        stdout.contains("images are bit-identical (784 pixels)"),
        "{stdout}"
    );
    assert!(
        stdout.contains("last step: 0 breaks, 0 driver calls; in all: 0 breaks"),
        "{stdout}"
    );
    let branches: Vec<&str> = stdout
        .lines()
        .filter(|line| line.contains("cond "))
        .collect();
    assert_eq!(
        branches.len(),
        2,
        "one branch with a class and one without: {stdout}"
    );
    for word in ["floor", "held", "virtual", "compiled", "plain"] {
        assert!(stdout.contains(word), "{word} is missing: {stdout}");
    }
}

#[test]
fn a_weight_budget_changes_no_pixel_and_prints_what_was_copied() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let out = folder.path().join("sheet.png");
    let output = [
        "--steps",
        "3",
        "--class",
        "7",
        "--samples",
        "1",
        "--compare",
    ];
    let budget = ["--weight-budget", "1MiB", "--out", text(&out)];
    let output = diffuse(&[&output[..], &budget].concat());
    assert!(output.status.success(), "{output:?}");
    let stdout = String::from_utf8_lossy(&output.stdout);
    for words in ["images are bit-identical", "copied a step", "1.00 MiB"] {
        assert!(stdout.contains(words), "{words} is missing: {stdout}");
    }
    let damaged = folder.path().join("w.safetensors");
    std::fs::write(&damaged, b"no weights").expect("a file is written");
    assert_refused(
        &["--weight-budget", "1MiB", "--weights", text(&damaged)],
        "w.safetensors do not fit the model unet: ",
    );
    // What cannot be read is told as without the budget, and once.
    for path in [&folder.path().join("absent.safetensors"), folder.path()] {
        let weights = ["--weights", text(path)];
        let plain = diffuse(&weights);
        let paged = diffuse(&[&weights[..], &["--weight-budget", "1MiB"]].concat());
        let told = String::from_utf8_lossy(&paged.stderr);
        assert_eq!(told, String::from_utf8_lossy(&plain.stderr));
        let start = format!("error: cannot read {}: ", path.display());
        assert!(told.starts_with(&start), "{told}");
        assert_eq!(told.matches(text(path)).count(), 1, "{told}");
        assert_eq!(paged.status.code(), Some(2));
    }
    assert_refused(&["--weight-budget", "1KiB"], "less than one page");
    assert_refused(
        &["--weight-budget", "64KiB", "--budget", "384KiB"],
        "weights that are used at once need",
    );
}

#[test]
fn devices_are_checked_before_anything_is_loaded() {
    assert_refused(&["--device", "mars"], "cpu, cuda or cuda:N");
    assert_refused(&["--device", "cuda:x"], "cpu, cuda or cuda:N");
    if !cfg!(feature = "cuda") {
        assert_refused(&["--device", "cuda:1"], "--features cuda");
    }
}

#[test]
fn help_and_version_are_no_errors() {
    for argument in ["--help", "--version"] {
        let output = diffuse(&[argument]);
        assert!(output.status.success());
        assert!(!output.stdout.is_empty());
    }
}

#[cfg(feature = "burn")]
#[test]
fn burn_draws_the_same_sheet_on_compiled_and_on_plain_memory() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let out = folder.path().join("sheet.png");
    let arguments = ["--framework", "burn", "--model", "dit", "--steps", "4"];
    let more = ["--class", "3", "--compare", "--out", text(&out)];
    let output = diffuse(&[&arguments[..], &more[..]].concat());
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{stdout}");
    assert!(stdout.contains("images are bit-identical"), "{stdout}");
    assert!(
        stdout.contains("cond") && stdout.contains("uncond"),
        "{stdout}"
    );
    assert!(out.exists());
    assert_refused(
        &["--framework", "burn", "--weight-budget", "1MiB"],
        "--weight-budget",
    );
}
