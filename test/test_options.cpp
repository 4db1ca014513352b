// The command line, the config file that holds the same options, and the learning rate schedules.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include <filesystem>
#include <fstream>
#include <set>

#include "llmc/options.h"

static Command parse(std::vector<std::string> args) {
    std::vector<const char*> argv = {"train_gpt"};
    for (const std::string& arg : args) argv.push_back(arg.c_str());
    return run_config_parse(int(argv.size()), argv.data());
}

// A valid command line and more.
static RunConfig parsed(std::vector<std::string> args) {
    args.insert(args.begin(), {"--train", "t.bin"});
    return parse(args).config;
}

static std::string error_of(std::vector<std::string> args) {
    try {
        parsed(args);
    } catch (const Error& e) {
        return e.what();
    }
    return "no error";
}

static std::string resolve_error_of(std::vector<std::string> args, int ranks = 1) {
    try {
        RunConfig c = parsed(args);
        run_config_resolve(c, ranks, ranks);
    } catch (const Error& e) {
        return e.what();
    }
    return "no error";
}

static bool holds(const std::string& text, const std::string& part) {
    const bool found = text.find(part) != std::string::npos;
    if (!found) MESSAGE("'" << part << "' is not in: " << text);
    return found;
}

struct ConfigFile {
    std::string path = std::filesystem::temp_directory_path() / ("llmc_options_" + std::to_string(getpid()) + ".json");
    explicit ConfigFile(const std::string& text) { std::ofstream(path) << text; }
    ~ConfigFile() { std::filesystem::remove(path); }
};

TEST_CASE("every option of the command line reaches its field") {
    const RunConfig c = parsed({"--model",
                                "gpt2:d6,c=384",
                                "--recompute",
                                "block",
                                "--val",
                                "v*.bin",
                                "--tokenizer",
                                "tok.json",
                                "--check-data",
                                "--tp",
                                "2",
                                "--pp",
                                "1",
                                "--sp",
                                "off",
                                "--threads",
                                "3",
                                "--comm",
                                "mpi",
                                "--comm-timeout",
                                "2.5",
                                "--check-replicas",
                                "7",
                                "--micro-batch",
                                "8",
                                "--seq",
                                "64",
                                "--global-batch",
                                "16",
                                "--steps",
                                "5000000000",
                                "--stop-step",
                                "9",
                                "--seed",
                                "18446744073709551615",
                                "--lr",
                                "1e-3",
                                "--min-lr",
                                "0",
                                "--warmup",
                                "0",
                                "--lr-decay-steps",
                                "12",
                                "--schedule",
                                "wsd",
                                "--weight-decay",
                                "0.2",
                                "--beta1",
                                "0",
                                "--beta2",
                                "0.999",
                                "--eps",
                                "1e-4",
                                "--master-weights",
                                "off",
                                "--clip",
                                "0",
                                "--tp-codec",
                                "taco:g=256",
                                "--codec",
                                "attn_in.bwd=bf16",
                                "--codec",
                                "head.fwd=none",
                                "--codec-threshold",
                                "4096",
                                "--codec-warmup",
                                "10",
                                "--snr-every",
                                "0",
                                "--val-every",
                                "5",
                                "--val-batches",
                                "6",
                                "--sample-every",
                                "8",
                                "--sample-tokens",
                                "100",
                                "--prompt",
                                "To be, [or] not",
                                "--temperature",
                                "0",
                                "--top-k",
                                "0",
                                "--out",
                                "o",
                                "--save-every",
                                "0",
                                "--keep",
                                "0",
                                "--resume",
                                "ckpt",
                                "--log",
                                "l.jsonl",
                                "--trace",
                                "t.json",
                                "--print-every",
                                "7"});
    CHECK(c.model == "gpt2:d6,c=384");
    CHECK(c.recompute == "block");
    CHECK(c.train == "t.bin");
    CHECK(c.val == "v*.bin");
    CHECK(c.tokenizer == "tok.json");
    CHECK(c.check_data);
    CHECK(c.tp == 2);
    CHECK(c.pp == 1);
    CHECK_FALSE(c.sp);
    CHECK(c.threads == 3);
    CHECK(c.comm == "mpi");
    CHECK(c.comm_timeout == 2.5f);
    CHECK(c.check_replicas == 7);
    CHECK(c.micro_batch == 8);
    CHECK(c.seq == 64);
    CHECK(c.global_batch == 16);
    CHECK(c.steps == 5000000000);
    CHECK(c.stop_step == 9);
    CHECK(c.seed == 18446744073709551615u);
    CHECK(c.lr == 1e-3f);
    CHECK(c.min_lr == 0);
    CHECK(c.warmup == 0);
    CHECK(c.lr_decay_steps == 12);
    CHECK(c.schedule == "wsd");
    CHECK(c.weight_decay == 0.2f);
    CHECK(c.beta1 == 0);
    CHECK(c.beta2 == 0.999f);
    CHECK(c.eps == 1e-4f);
    CHECK_FALSE(c.master_weights);
    CHECK(c.clip == 0);
    CHECK(c.tp_codec == "taco:g=256");
    CHECK(c.codec == std::map<std::string, std::string>{{"attn_in.bwd", "bf16"}, {"head.fwd", "none"}});
    CHECK(c.codec_threshold == 4096);
    CHECK(c.codec_warmup == 10);
    CHECK(c.snr_every == 0);
    CHECK(c.val_every == 5);
    CHECK(c.val_batches == 6);
    CHECK(c.sample_every == 8);
    CHECK(c.sample_tokens == 100);
    CHECK(c.prompt == "To be, [or] not");
    CHECK(c.temperature == 0);
    CHECK(c.top_k == 0);
    CHECK(c.out == "o");
    CHECK(c.save_every == 0);
    CHECK(c.keep == 0);
    CHECK(c.resume == "ckpt");
    CHECK(c.log == "l.jsonl");
    CHECK(c.trace == "t.json");
    CHECK(c.print_every == 7);

    // The list above leaves none out, and no two options share a field.
    const nlohmann::json set = run_config_json(c), defaults = run_config_json(RunConfig());
    for (const auto& [key, value] : set.items()) {
        CAPTURE(key);
        CHECK((value != defaults[key] || key == "pp"));
    }
    CHECK(set.size() == options_detail::run_options().size());
}

TEST_CASE("flags: forms, repetition, values left out") {
    CHECK(parsed({"--lr=2e-4"}).lr == 2e-4f);
    CHECK(parsed({"--tp", "2", "--tp", "4"}).tp == 4);  // scripts append what they change
    CHECK(parsed({"--prompt", ""}).prompt == "");
    CHECK(parsed({"--resume", "--tp", "2"}).resume == "latest");
    CHECK(parsed({"--resume"}).resume == "latest");
    CHECK(parsed({"--check-data", "--tp", "2"}).check_data);
    CHECK_FALSE(parsed({"--check-data", "off"}).check_data);
    CHECK(parsed({"--codec", "head.fwd=bf16", "--codec", "head.fwd=none"}).codec["head.fwd"] == "none");
}

TEST_CASE("wrong values are named, with what is allowed") {
    CHECK(holds(error_of({"--lr", "fast"}), "--lr: expected a number, found 'fast'"));
    CHECK(holds(error_of({"--lr", "nan"}), "--lr: expected a number, found 'nan'"));
    CHECK(holds(error_of({"--lr", "1e39"}), "--lr: 1e39 does not fit"));
    CHECK(holds(error_of({"--lr", "-1e-3"}), "--lr: -1e-3 is out of range; it must be at least 0"));
    CHECK(holds(error_of({"--tp", "0"}), "--tp: 0 is out of range; it must be at least 1"));
    CHECK(holds(error_of({"--tp", "2.5"}), "--tp: expected a whole number, found '2.5'"));
    CHECK(holds(error_of({"--tp", "3000000000"}), "--tp: 3000000000 does not fit"));
    CHECK(holds(error_of({"--tp", ""}), "--tp: expected a whole number, found ''"));
    CHECK(holds(error_of({"--seed", "-1"}), "--seed: -1 is out of range; it must be at least 0"));
    CHECK(holds(error_of({"--beta1", "1"}), "--beta1: 1 is out of range; it must be at least 0 and below 1"));
    CHECK(holds(error_of({"--eps", "0"}), "--eps: 0 is out of range; it must be above 0"));
    CHECK(holds(error_of({"--clip", "-1"}), "--clip: -1 is out of range"));
    CHECK(holds(error_of({"--keep", "-1"}), "--keep: -1 is out of range"));
    CHECK(holds(error_of({"--comm-timeout", "0"}), "--comm-timeout: 0 is out of range"));
    CHECK(holds(error_of({"--sp", "maybe"}), "--sp: expected on or off, found 'maybe'"));
    CHECK(holds(error_of({"--schedule", "cos"}), "--schedule: 'cos' is not known; allowed: cosine|linear|constant|wsd"));
    CHECK(holds(error_of({"--schedule", "cosine|linear"}), "is not known"));
    CHECK(holds(error_of({"--recompute", ""}), "--recompute: '' is not known; allowed: none|gelu|block"));
    CHECK(holds(error_of({"--tp-codec", "zip"}), "--tp-codec: codec 'zip'"));
    CHECK(holds(error_of({"--tp-codec", "taco:target=57734"}), "--tp-codec: codec 'taco:target=57734'"));
    CHECK(holds(error_of({"--codec", "attn_in.bwd=hadint9"}), "--codec: codec 'hadint9'"));
    CHECK(holds(error_of({"--codec", "attn.bwd=bf16"}), "--codec: there is no boundary 'attn.bwd'; allowed: embed.fwd"));
    CHECK(holds(error_of({"--codec", "embed.fwd mlp_in.fwd=bf16"}), "there is no boundary"));
    CHECK(holds(error_of({"--codec", "bf16"}), "--codec: expected BOUNDARY=SPEC"));
    CHECK(holds(error_of({"--val", "--check-data"}), "--val: its value is missing; the flag --check-data follows"));
    CHECK(parsed({"--prompt", "--What?"}).prompt == "--What?");
    CHECK(holds(error_of({"--lr"}), "--lr"));
    CHECK(holds(error_of({"--lr"}), "see --help"));
}

TEST_CASE("unknown flags name the nearest") {
    CHECK(holds(error_of({"--micro_batch", "3"}), "unknown flag --micro_batch; did you mean --micro-batch?"));
    CHECK(holds(error_of({"--weight-deacy=0.1"}), "unknown flag --weight-deacy; did you mean --weight-decay?"));
    CHECK(holds(error_of({"--zzzzzzzzzzzzzz"}), "unknown flag --zzzzzzzzzzzzzz; see --help"));
    CHECK(holds(error_of({"--val", "a.bin", "b.bin"}), "'b.bin' belongs to no flag; quote"));
    CHECK(holds(error_of({"-x"}), "'-x' belongs to no flag"));
    try {
        parse({"--tp", "2"});
        FAIL("--train may not be missing");
    } catch (const Error& e) {
        CHECK(holds(e.what(), "--train is missing"));
    }
}

TEST_CASE("a config file, and flags that beat it") {
    const ConfigFile file(R"({"micro-batch": 3, "lr": 1, "sp": false, "min_lr": null, "prompt": "x", "steps": 10,
                              "codec": {"head.fwd": "bf16", "head.bwd": "int8"}})");
    const RunConfig c = parsed({"--config", file.path, "--lr", "0.5", "--codec", "head.fwd=fp8"});
    CHECK(c.micro_batch == 3);
    CHECK(c.lr == 0.5f);
    CHECK_FALSE(c.sp);
    CHECK(c.prompt == "x");
    CHECK(c.min_lr == RunConfig().min_lr);
    CHECK(c.steps == 10);
    CHECK(c.codec == std::map<std::string, std::string>{{"head.fwd", "fp8"}, {"head.bwd", "int8"}});
}

TEST_CASE("mistakes in a config file name the file and the key") {
    const auto error_in = [](const std::string& text) {
        const ConfigFile file(text);
        const std::string error = error_of({"--config", file.path});
        CHECK(holds(error, file.path));
        return error;
    };
    CHECK(holds(error_in(R"({"micro_bacth": 3})"), R"(unknown key "micro_bacth"; did you mean micro_batch?)"));
    CHECK(holds(error_in(R"({"config": "other.json"})"), R"(unknown key "config")"));
    CHECK(holds(error_in(R"({"micro_batch": "3"})"), R"("micro_batch": expected a whole number, found "3")"));
    CHECK(holds(error_in(R"({"micro_batch": 3.5})"), R"("micro_batch": expected a whole number, found '3.5')"));
    CHECK(holds(error_in(R"({"micro_batch": -3})"), R"("micro_batch": -3 is out of range)"));
    CHECK(holds(error_in(R"({"lr": true})"), R"("lr": expected a number, found true)"));
    CHECK(holds(error_in(R"({"sp": "on"})"), R"("sp": expected true or false, found "on")"));
    CHECK(holds(error_in(R"({"model": 12})"), R"("model": expected a string, found 12)"));
    CHECK(holds(error_in(R"({"schedule": "cos"})"), R"("schedule": 'cos' is not known)"));
    CHECK(holds(error_in(R"({"codec": ["head.fwd=bf16"]})"), R"("codec": expected an object)"));
    CHECK(holds(error_in(R"({"codec": {"head.fwd": 8}})"), R"("codec": expected an object)"));
    CHECK(holds(error_in(R"({"codec": {"tail.fwd": "bf16"}})"), R"("codec": there is no boundary 'tail.fwd')"));
    CHECK(holds(error_in(R"({"lr": 1, "min-lr": 0, "min_lr": 0})"), R"(are the same option)"));
    CHECK(holds(error_in(R"([1])"), "expected a JSON object"));
    CHECK(holds(error_in(R"({"lr": 1)"), "not valid JSON"));
    CHECK(holds(error_of({"--config", "/nonexistent.json"}), "/nonexistent.json"));
}

TEST_CASE("--print-config is what --config reads, to the bit") {
    Command command = parse({"--print-config", "--lr", "0.3", "--eps", "1e-7", "--codec", "head.fwd=taco:g=64:sr", "--prompt",
                             "a \"b\"\n\xc3\xa9", "--seed", "18446744073709551615", "--check-data", "--sp", "off"});
    CHECK(command.action == Command::print_config);  // and --train may be missing
    for (const bool resolved : {false, true}) {
        if (resolved) run_config_resolve(command.config, 2, 2);
        const ConfigFile file(run_config_text(command.config));
        const RunConfig again = parse({"--config", file.path, "--print-config"}).config;
        CHECK(run_config_json(again) == run_config_json(command.config));
        CHECK(again.lr == command.config.lr);
        CHECK(again.min_lr == command.config.min_lr);
        CHECK(again.eps == command.config.eps);
    }
    CHECK(run_config_text(command.config).find("\"lr\": 0.3,") != std::string::npos);  // not 0.30000001192092896
}

TEST_CASE("defaults that depend on other values") {
    RunConfig c = parsed({"--tp", "2", "--micro-batch", "3", "--steps", "200", "--lr", "0.5", "--resume", "--out", "o"});
    run_config_resolve(c, 8, 8);
    CHECK(c.global_batch == 12);  // dp = 4
    CHECK(c.min_lr == 0.05f);
    CHECK(c.lr_decay_steps == 200);
    CHECK(c.warmup == 4);
    CHECK(c.stop_step == 200);
    CHECK(c.threads >= 1);
    CHECK(c.resume == "o");

    RunConfig given =
        parsed({"--min-lr", "0", "--warmup", "0", "--lr-decay-steps", "7", "--global-batch", "8", "--threads", "5"});
    run_config_resolve(given, 2, 2);
    CHECK(given.min_lr == 0);
    CHECK(given.warmup == 0);
    CHECK(given.lr_decay_steps == 7);
    CHECK(given.global_batch == 8);
    CHECK(given.threads == 5);
    CHECK(given.resume == "");

    CHECK(holds(resolve_error_of({"--global-batch", "10", "--micro-batch", "4"}), "the nearest that is: 12"));
    CHECK(holds(resolve_error_of({"--global-batch", "2", "--micro-batch", "4"}, 2), "the nearest that is: 8"));
    CHECK(holds(resolve_error_of({"--resume"}), "needs --out"));
    CHECK(holds(resolve_error_of({"--min-lr", "1"}), "--min-lr 1 is above --lr 0.0006"));
    CHECK(holds(resolve_error_of({"--steps", "5", "--warmup", "6"}), "--warmup 6 is longer than --lr-decay-steps 5"));
    CHECK(holds(resolve_error_of({"--steps", "5", "--stop-step", "6"}), "--stop-step 6 is beyond --steps 5"));
    CHECK(resolve_error_of({"--steps", "5", "--warmup", "6", "--schedule", "constant"}) == "no error");
}

TEST_CASE("OMP_NUM_THREADS is the default of --threads") {
    setenv("OMP_NUM_THREADS", "3", 1);
    RunConfig c = parsed({});
    run_config_resolve(c, 1, 1);
    CHECK(c.threads == 3);
    setenv("OMP_NUM_THREADS", "nonsense", 1);
    RunConfig d = parsed({});
    run_config_resolve(d, 1, 1000);
    CHECK(d.threads == 1);
    unsetenv("OMP_NUM_THREADS");
}

TEST_CASE("--help lists every option, group, model width, codec and boundary") {
    CHECK(parse({"--help"}).action == Command::help);
    CHECK(parse({"--tp", "2", "-h"}).action == Command::help);
    const std::string help = run_config_help();
    for (const options_detail::Option& option : options_detail::run_options()) {
        CHECK(holds(help, "--" + std::string(option.name) + " "));
        CHECK(holds(help, "\n" + std::string(option.group) + ":\n"));
    }
    for (const char* text : {"d6 384/6", "d12 768/12", "d24 1024/16", "d36 1280/20", "d48 1600/25", "d60 1920/30", "d72 2880/30",
                             "d84 3456/36", "hadint4", "taco", "mlp_out.bwd", "--config FILE", "--print-config"})
        CHECK(holds(help, text));
}

// By hand from the formulas: lr 1, min_lr 0.1, warm-up 4, decay to step 20.
TEST_CASE("learning rates") {
    const auto rate = [](Schedule s, long step) { return double(learning_rate(s, step, 1.0f, 0.1f, 4, 20)); };
    for (const Schedule s : {Schedule::cosine, Schedule::linear, Schedule::constant, Schedule::wsd}) {
        CHECK(rate(s, 0) == doctest::Approx(0.2));
        CHECK(rate(s, 3) == doctest::Approx(0.8));
        CHECK(rate(s, 4) == doctest::Approx(1.0));
    }
    CHECK(rate(Schedule::cosine, 8) == doctest::Approx(0.1 + 0.9 * 0.8535533906));  // (1 + cos 45 degrees) / 2
    CHECK(rate(Schedule::cosine, 12) == doctest::Approx(0.55));
    CHECK(rate(Schedule::cosine, 19) == doctest::Approx(0.1 + 0.9 * 0.0096073598));  // (1 + cos 168.75 degrees) / 2
    CHECK(rate(Schedule::linear, 8) == doctest::Approx(0.775));
    CHECK(rate(Schedule::linear, 12) == doctest::Approx(0.55));
    CHECK(rate(Schedule::wsd, 15) == doctest::Approx(1.0));
    CHECK(rate(Schedule::wsd, 16) == doctest::Approx(1.0));
    CHECK(rate(Schedule::wsd, 17) == doctest::Approx(0.775));
    CHECK(rate(Schedule::wsd, 18) == doctest::Approx(0.55));
    CHECK(rate(Schedule::constant, 1000) == 1.0);
    for (const Schedule s : {Schedule::cosine, Schedule::linear, Schedule::wsd}) {
        CHECK(rate(s, 20) == doctest::Approx(0.1));
        CHECK(rate(s, 1000) == doctest::Approx(0.1));
        CHECK(learning_rate(s, 0, 1.0f, 0.1f, 0, 20) == 1.0f);  // no warm-up
        CHECK(learning_rate(s, 0, 1.0f, 0.1f, 0, 0) == 0.1f);   // nothing to decay over
        CHECK(learning_rate(s, 1, 1.0f, 0.1f, 2, 2) == doctest::Approx(2.0 / 3));
        CHECK(learning_rate(s, 2, 1.0f, 0.1f, 2, 2) == 0.1f);
    }
    // nanoGPT's anchor run: lr 1e-3 to 1e-4, warm-up 100, 2,000 steps.
    CHECK(learning_rate(Schedule::cosine, 0, 1e-3f, 1e-4f, 100, 2000) == doctest::Approx(1e-3 / 101));
    CHECK(learning_rate(Schedule::cosine, 1050, 1e-3f, 1e-4f, 100, 2000) == doctest::Approx(5.5e-4));
    CHECK(schedule_parse("wsd") == Schedule::wsd);
    CHECK_THROWS_AS(schedule_parse("cos"), Error);
}
