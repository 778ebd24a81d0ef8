import java.util.Scanner;

/** Reads operations, applies them to the submitted class, and prints the results. */
class Main {
    public static void main(String[] arguments) throws Exception {
        Scanner input = new Scanner(System.in);
        RingBuffer buffer = new RingBuffer(input.nextInt());
        while (input.hasNext()) {
            if (input.next().equals("add")) buffer.add(input.nextInt());
            else System.out.println(buffer.size() == 0 ? "empty" : buffer.remove());
        }
    }
}
